"""The patch corruption model of RSPC (Guo et al. 2023, Sec. 3.2): a small network that picks patches to occlude."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion.errors import BastionError
from bastion.memory import check_memory
from bastion.models import checkpoint
from bastion.models.load import locate
from bastion.models.meta import meta
from bastion.patches import Grid, token_grid


class CorruptionModel(nn.Module):
    """Scores the patches of an image: a convolution over each patch, GELU, and a linear layer over all patches.

    For images of `shape` (C, H, W) with pixels in [0, 1]. 39,184 parameters at 224 pixels with patches of 16.
    """

    image_size: Tensor  # height and width, stored with the weights

    def __init__(self, shape: Sequence[int], patch_size: int) -> None:
        super().__init__()
        self.grid = Grid.tiling(shape, patch_size)
        self.register_buffer("image_size", torch.tensor([self.grid.height, self.grid.width]))
        self.score = nn.Conv2d(shape[0], 1, patch_size, patch_size, bias=False)
        trained = 3 * 4 * self.grid.count**2  # bytes of the weights of `mix`, their gradient and its momentum
        where = f"patch_size: a corruption model of {self.grid.count:,} patches of {patch_size} pixels"
        check_memory(trained, self.score.weight.device, where, "take larger ones")
        self.mix = nn.Linear(self.grid.count, self.grid.count, bias=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}image_size", self.image_size)  # older checkpoints do not have it
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """(B, patches), row by row; the highest scores are of the patches to occlude."""
        if x.shape[1:] != (self.score.in_channels, self.grid.height, self.grid.width):
            expected = f"(B, {self.score.in_channels}, {self.grid.height}, {self.grid.width})"
            raise BastionError(f"corruption model: expected images of {expected}, got {tuple(x.shape)}")
        with torch.autocast(x.device.type, enabled=False):  # in half precision many scores would be equal
            normalised = 4 * x.to(self.score.weight.dtype) - 2  # as there are no biases, mid-grey is mapped to 0
            scores: Tensor = self.mix(F.gelu(self.score(normalised)).flatten(1))
        return scores

    def choose(self, x: Tensor, share: float) -> Tensor:
        """(B, count): the numbers of the patches to occlude, ⌈share · patches⌉ of each image."""
        with torch.no_grad():
            return self.grid.highest(self(x), self.grid.share(share))


def keep_mask(scores: Tensor, grid: Grid, count: int, *, grad_scale: float = 1.0, processes: int = 1) -> Tensor:
    """(B, 1, H, W): 0 on the `count` patches of each image with the highest scores, 1 elsewhere.

    The gradient is a straight-through estimate (Hubara et al. 2016): a patch's mask is differentiated as if it were its
    negative score. Times `grad_scale`, it is clipped to [-1, 1] for each patch. Where `processes` average their
    gradients, that of one is so many times the whole batch's, which is the one to clip.
    """
    keep: Tensor = _Binarise.apply(scores, grid, count, grad_scale, processes)  # type: ignore[no-untyped-call]
    rows, columns = grid.shape
    tiles = keep.view(-1, 1, rows, 1, columns, 1).expand(-1, 1, rows, grid.size, columns, grid.size)
    return tiles.reshape(-1, 1, grid.height, grid.width)


class _Binarise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, grid: Grid, count: int, grad_scale: float, processes: int) -> Tensor:
        ctx.grad_scale, ctx.processes = grad_scale, processes
        return torch.ones_like(scores).scatter(1, grid.highest(scores, count), 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        clipped = (ctx.grad_scale / ctx.processes * gradient).clamp(-1, 1)
        return -ctx.processes * clipped, None, None, None, None


def load_corruption_model(name: str | Path) -> CorruptionModel:
    """The corruption model that RSPC trained beside a model, as it was when that model was saved.

    `name` is a run, finished or not, or the folder of its model.
    """
    folder = locate(name)
    (channels, *image), tensors = checkpoint.read_card(folder).shape, checkpoint.load_networks(folder)
    if not tensors:
        raise BastionError(
            f"{folder}: has no corruption model: its objective trained no network beside the model; give a run of the "
            "objective rspc with `patches: learned`"
        )
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        with meta():  # so that a wrong card cannot make it allocate memory
            size, count = found["score.weight"][-1], found["mix.weight"][0]
            if "image_size" in tensors:
                height, width = map(int, tensors["image_size"])
            else:  # older ones do not have it: images of the data's aspect ratio
                height, width = (size * side for side in token_grid(count, *image))
            model = CorruptionModel((channels, height, width), size)
        model.load_state_dict({"image_size": torch.tensor([height, width]), **tensors}, assign=True)
    except (BastionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise BastionError(
            f"{folder}: the networks of its objective are no corruption model for images of "
            f"{'×'.join(map(str, (channels, *image)))}: {found}; give a run of the objective rspc"
        ) from error
    return model.eval().requires_grad_(False)
