"""The cost of a model: parameters, and multiply-accumulates of a forward pass on one image."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from bastion.forward import device_of, in_mode
from bastion.models.classifier import Classifier


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: Classifier | nn.Module, shape: tuple[int, int, int] | None = None) -> int:
    """Multiply-accumulates, which papers call FLOPs: half of torch's count of floating-point operations.

    `shape` of the image: by default the classifier's input shape.
    """
    counter = FlopCounterMode(display=False)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}  # it fails on some parameters
    image = torch.zeros(1, *(shape or model.shape), device=device_of(model))  # type: ignore[misc]
    # Unfused attention: the counter does not know the fused kernels of every device, nor the one of
    # nn.MultiheadAttention and nn.TransformerEncoderLayer, which do not use it inside a function mode.
    with (
        torch.no_grad(),
        in_mode(model, training=False),
        sdpa_kernel(SDPBackend.MATH),
        BaseTorchFunctionMode(),
        counter,
    ):
        torch.func.functional_call(model, state, image)
    return int(counter.get_total_flops()) // 2
