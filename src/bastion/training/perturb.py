"""Weight perturbations of SAM (Foret et al. 2021) and AWP (Wu et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bastion.recipe import Perturb


@contextmanager
def perturbed(parameters: Iterable[nn.Parameter], settings: Perturb) -> Iterator[None]:
    """Inside, weights are moved along their gradients; afterwards they are restored bit for bit."""
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    if settings.name == "awp":  # not norms and biases
        moved = [parameter for parameter in moved if parameter.ndim > 1]
    before = [parameter.detach().clone() for parameter in moved]
    with torch.no_grad():
        for parameter, step in zip(moved, _steps(moved, settings), strict=True):
            parameter.add_(step)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, before, strict=True):
                parameter.copy_(value)


def _steps(parameters: list[nn.Parameter], settings: Perturb) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    lengths = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    if settings.name == "sam":
        scale = settings.size / (torch.linalg.vector_norm(torch.stack(lengths)) + 1e-12)
        return [scale * gradient for gradient in gradients]
    return [
        settings.size * torch.linalg.vector_norm(parameter) / (length + 1e-12) * gradient
        for parameter, gradient, length in zip(parameters, gradients, lengths, strict=True)
    ]


@contextmanager
def quiet_norms(model: nn.Module) -> Iterator[None]:
    """Inside, BatchNorms use the batch's statistics, but do not update the running ones."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    counts = [norm.num_batches_tracked.clone() if norm.num_batches_tracked is not None else None for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, before, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)
