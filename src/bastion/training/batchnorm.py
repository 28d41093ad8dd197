"""BatchNorm over the batch of all processes. torch has one for GPUs only; this one runs everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bastion.errors import BastionError


class _Total(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of everybody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Total.forward(ctx, gradient.contiguous())


class SharedBatchNorm2d(nn.BatchNorm2d):
    """In train mode, mean and variance of the images of all processes; every process must have as many."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = _Total.apply(x.sum((0, 2, 3))) / count  # type: ignore[no-untyped-call]
        centred = x - mean[:, None, None]
        variance = _Total.apply(centred.square().sum((0, 2, 3))) / count  # type: ignore[no-untyped-call]
        self._remember(mean.detach(), variance.detach() * count / max(count - 1, 1))
        y: Tensor = centred * (variance + self.eps).rsqrt()[:, None, None]
        return y if self.weight is None else y * self.weight[:, None, None] + self.bias[:, None, None]

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


def share_batchnorms(module: nn.Module) -> None:
    """Make every BatchNorm2d one over all processes, in place; weights and buffers stay."""
    for name, part in module.named_modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = SharedBatchNorm2d
        elif isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise BastionError(
                f"sync_batchnorm: {name} is a {type(part).__name__}, which cannot be shared; set it false"
            )
