"""RVT's patch-wise augmentation (Mao et al. 2022, Towards robust vision transformer): each patch changes by itself.

The code of RVT, and with it that of RSPC, sends a batch through the network twice, clean and augmented, and discards
the gradient of the second pass before the step, so there it has no effect. Here an image is augmented with probability
`prob`, one half: on average a step has the gradient of both passes, for the cost of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion import rng
from bastion.errors import BastionError
from bastion.recipe import Patchwise

LARGEST = 16  # RVT's patch at 224 pixels
LEAST_ACROSS = 7  # patches along the shorter side, if the size is not given: 4 pixels at 32, 8 at 64, 16 from 112 on


def patch_size(given: int | None, height: int, width: int) -> int:
    """Return a patch size that tiles the image: the given one, or the largest sensible one."""
    most = min(height, width) if given else min(LARGEST, min(height, width) // LEAST_ACROSS)
    for size in [given] if given else range(most, 1, -1):
        if size <= most and height % size == width % size == 0:
            return size
    what = f"patches of {given}×{given} pixels do not" if given else f"no patches of 2 to {max(most, 2)} pixels"
    raise BastionError(
        f"augment.patchwise.size: {what} tile an image of {height}×{width}; give a divisor of both sides"
    )


@dataclass(frozen=True)
class PatchTransform:
    """Zooms into, adds noise to, or flips some patches of some images of a batch."""

    settings: Patchwise
    size: int
    strength: float = 1.0  # of `prob`

    def __call__(self, x: Tensor, index: Tensor, *, seed: int, draw: Tensor) -> Tensor:
        """Augment x (B, C, H, W) in [0, 1]; all randomness is a function of seed, index and draw, both (B,)."""
        settings, changed = self.settings, x.clone(memory_format=torch.contiguous_format)
        patches = _patches(changed, self.size)
        across = patches.shape[1:3]
        image = rng.uniform(seed, index, draw) < settings.prob * self.strength
        crop, noise, flip, *place = rng.uniform(rng.key("patches", seed), index, draw, (6, *across)).unbind(1)
        which = (crop < settings.crop) & image[:, None, None]  # (B, rows, columns)
        scale, top, left = (each[which].to(x) for each in place)
        scale = settings.scale[0] + (settings.scale[1] - settings.scale[0]) * scale
        patches[which] = _zoom(patches[which], scale, top, left)
        which = (noise < settings.noise) & image[:, None, None]
        patches[which] = (patches[which] + settings.sigma * _noise(which, patches, index, seed, draw)).clamp(0, 1)
        which = (flip < settings.hflip) & image[:, None, None]
        patches[which] = patches[which].flip(-1)
        return changed


def _patches(x: Tensor, size: int) -> Tensor:
    """Return (B, rows, columns, C, size, size), a view of x."""
    batch, channels, height, width = x.shape
    return x.view(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)


def _zoom(patches: Tensor, scale: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Crop a square with this share of each patch's area and resize it to the patch; top and left from 0 to 1."""
    size = patches.shape[-1]
    centres = (2 * torch.arange(size, device=patches.device) + 1).to(patches) / size - 1  # pixel centres, from -1 to 1
    side = scale.sqrt()[:, None]
    down, right = (side * centres + (1 - side) * (2 * start[:, None] - 1) for start in (top, left))  # (patches, size)
    where = torch.stack([right[:, None, :].expand(-1, size, -1), down[:, :, None].expand(-1, -1, size)], -1)
    return F.grid_sample(patches, where, mode="bilinear", padding_mode="border", align_corners=False).clamp(0, 1)


def _noise(which: Tensor, patches: Tensor, index: Tensor, seed: int, draw: Tensor) -> Tensor:
    """Return standard normal noise for the chosen patches only, each with its own draw by its place."""
    image, place = which.flatten(1).nonzero().unbind(1)
    own = draw[image] * which[0].numel() + place
    return rng.normal(rng.key("noise", seed), index[image], own, patches.shape[3:], patches.dtype)
