"""BatchNorm over the batches of all processes, on any device; torch's SyncBatchNorm runs on GPUs only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bastion.errors import BastionError


class _Normalised(torch.autograd.Function):
    """Normalise x by the statistics of all processes; the gradient goes through the statistics too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, mean, (variance + eps).rsqrt())
        return F.batch_norm(x, mean, variance, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        centred = x - _over_pixels(mean)
        gradient = gradient.to(centred.dtype)  # the precision of the statistics: bfloat16 is too coarse for the sums
        sums = torch.stack([gradient.sum((0, 2, 3)), (gradient * centred).sum((0, 2, 3))])
        dist.all_reduce(sums)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        alike, along = sums / count
        centred *= _over_pixels(-along * scale.square())
        return ((centred + (gradient - _over_pixels(alike))) * _over_pixels(scale)).to(x.dtype), None, None, None


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that, in train mode, uses mean and variance over all processes, which must have equal batch sizes."""

    together = True  # a pass in train mode waits for all processes

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        mean, variance = self._statistics(x.detach())
        y: Tensor = _Normalised.apply(x, mean, variance, self.eps)  # type: ignore[no-untyped-call]
        if self.weight is None:
            return y
        return torch.addcmul(_over_pixels(self.bias), y, _over_pixels(self.weight)).to(x.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance over the images of all processes; updates the running ones."""
        exact = x if x.dtype == torch.float64 else x.float()
        own = torch.stack(torch.batch_norm_update_stats(exact, None, None, 0.0))
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, own)
        means, variances = torch.stack(everybody, 1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            count = x.numel() // x.shape[1] * len(everybody)
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * count / max(count - 1, 1), share)
        return mean, variance


def _over_pixels(values: Tensor) -> Tensor:
    return values[:, None, None]


def convert_batchnorms(module: nn.Module) -> None:
    """Turn every BatchNorm2d into a SyncBatchNorm2d, in place."""
    for name, part in module.named_modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = SyncBatchNorm2d
        elif isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise BastionError(
                f"sync_batchnorm: {name} is a {type(part).__name__}, which cannot be shared; set it false"
            )
