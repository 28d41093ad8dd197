"""Logits of images that differ from known ones in a small square, for the price of what the square changes.

Convolutions are local: a square of 4×4 pixels changes 6×6 of what the first 3×3 convolution makes, 8×8 of what the
second makes, and so on. So the changed window alone goes through the model, as a `WindowTensor`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.acceleration import Accelerated
from bastion.acceleration.window_tensor import ActivationCache, WindowTensor
from bastion.forward import MASKED

CLOSE = 2e-5  # of the largest logit: two ways to the same logits
CHECKED = 256  # every so many times, logits are compared with the model's own


class Incremental:
    """A model run again and again on images near those that are kept."""

    def __init__(self, model: Accelerated) -> None:
        self.model = model
        self.cache = ActivationCache()
        self.known: tuple[int, Tensor] | None = None  # side of the squares, and whose images the cache holds
        self.useless: set[int] = set()  # sides
        self.calls = 0

    def logits(self, x: Tensor, kept: Tensor, corner: Tensor, side: int, whose: Tensor) -> Tensor:
        """Logits at x, which differs from `kept` in a square of this side at most.

        `corner` (B, 2): row and column of each square's first pixel; `whose` (B, n): which images these are.
        """
        near = self._changed_logits(x, corner, side) if self._knows(side, whose) else None
        self.calls += 1
        if near is not None and self.calls % CHECKED:
            return near
        logits: Tensor = self.model.logits(x)
        if near is not None:
            if _agree(near, logits):
                return logits
            self.useless.add(side)
        self.cache, self.known = ActivationCache(), None
        fits = self.model.copied and x.dtype == torch.float32 and x.device.type == "cpu"
        small = 2 * side <= min(x.shape[2:]) and side not in self.useless
        if fits and small and self._learns(x, kept, corner, side, logits):
            self.known = side, whose
        return logits

    def accept(self, rows: Tensor) -> None:
        """What came last is kept, in the rows of a mask."""
        if self.known is not None:
            self.cache.accept(rows)

    def _knows(self, side: int, whose: Tensor) -> bool:
        """Does the cache hold these images, for squares of this side? Others are dropped from it."""
        if self.known is None or self.known[0] != side:
            return False
        if not torch.equal(self.known[1], whose):
            same = (whose[:, None] == self.known[1]).all(2)
            if not same.any(1).all():
                return False
            self.cache.select(same.int().argmax(1))
            self.known = side, whose
        return True

    def _learns(self, x: Tensor, kept: Tensor, corner: Tensor, side: int, logits: Tensor) -> bool:
        """Fill the cache. Its logits are compared with the model's own before others are trusted."""
        try:
            self.model.network(WindowTensor.learning(self.cache, kept.clone(), side))
        except Exception:  # whatever a stranger's model does with what is no tensor
            self.cache = ActivationCache()
        near = self._changed_logits(x, corner, side) if self.cache.pays() else None
        if near is not None and _agree(near, logits):
            return True
        self.useless.add(side)
        self.cache = ActivationCache()
        return False

    def _changed_logits(self, x: Tensor, corner: Tensor, side: int) -> Tensor | None:
        """None: the model does something else than before."""
        self.cache.recall()
        try:
            logits: Tensor = self.model.network(WindowTensor.changed(self.cache, x, corner, side))
        except Exception:  # by another way through the model, too
            logits = x.new_empty(0)
        if not (len(logits) and self.cache.is_through()):
            self.useless.add(side)
            return None
        return logits.to(x.dtype)


def _agree(near: Tensor, logits: Tensor) -> bool:
    """But for rounding, in every row. Classes that were taken out of the model by hand say nothing of its precision."""
    taken = logits < logits.amax(1, keepdim=True) - MASKED
    largest = logits.abs().masked_fill(taken, 0).amax(1, keepdim=True)
    error = torch.where(near == logits, 0, (near - logits).abs())
    return bool((error.masked_fill(taken, 0) <= CLOSE * largest).all())
