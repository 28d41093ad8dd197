"""Square Attack (Andriushchenko et al. 2020): random search over squares, without gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state
from bastion.attacks.losses import margin
from bastion.settings import AtLeastOne, Count, Share, settings
from bastion.threat import SAFETY, Norm, Threat, project
from bastion.types import Attack, Batch

# The share of the image that a square covers is halved after each of these queries, of 10,000.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
TILES = 5  # the first image of l2 and l1 has TILES × TILES tiles with a pattern
QUERIES_DRAWN = 64  # a search draws its random numbers for this many queries at once


@attacks.register("square")
@settings
class Square(Attack):
    """Square Attack (Andriushchenko et al. 2020): random squares, kept if they lower the margin; no gradients.

    `rescale` stretches the schedule of square sizes, made for 10,000 queries, to `queries`; AutoAttack does not.
    """

    queries: Count = 5000  # forward passes of a search
    share: Share = 0.8  # of the image, covered by the first squares
    restarts: AtLeastOne = 1  # searches, each with other random squares
    rescale: bool = False  # stretch the schedule of square sizes to `queries`

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        kind = PaintedSquares if threat.norm == "linf" else MovedSquares
        return attack(
            model, batch, threat, lambda classes: kind(self, threat, seed), name="square", restarts=self.restarts
        )

    def passes(self, norm: Norm) -> int:
        return self.restarts * (self.queries + 1)

    def sides(self, height: int, width: int, *, odd: bool) -> Tensor:
        """(queries,) the side of the square that each query changes, in pixels."""
        stretch = 10_000 / max(self.queries, 1) if self.rescale else 1.0
        sides = []
        for query in range(self.queries):
            halvings = sum(int(query * stretch) > after for after in HALVINGS)
            side = max(round(math.sqrt(self.share / 2**halvings * height * width)), 1)
            if odd:
                side = max(side, 3)
                side += side % 2 == 0
            sides.append(min(side, height, width))
        return torch.tensor(sides, dtype=torch.int64)


@dataclass
class Squares(SearchState):
    kept: Tensor  # the best x so far
    kept_margin: Tensor  # (B,) of the right class at `kept`; lower is better
    index: Tensor
    random: Tensor  # (B, QUERIES_DRAWN, …) random numbers of the current queries


class RandomSquares(Search[Squares]):
    """Try the kept x with one square changed; keep the change if it lowers the margin."""

    odd = True
    gradient_free = True

    def __init__(self, settings: Square, threat: Threat, seed: int) -> None:
        self.settings, self.threat, self.seed = settings, threat, seed
        self.sides = torch.zeros(0)

    def start(self, jobs: Jobs, batch: Batch) -> Squares:
        self.sides = self.settings.sides(*batch.x.shape[2:], odd=self.odd).to(batch.x.device)
        x = self.first(batch, jobs.number)
        worst = x.new_full((len(x),), torch.inf)
        random = x.new_zeros(len(x), QUERIES_DRAWN, self.numbers(batch.x.shape[1]), dtype=torch.float32)
        return Squares(
            **initial_state(jobs, batch, x),
            kept=x.clone(),
            kept_margin=worst,
            index=batch.index,
            random=random,
        )

    def wants_gradient(self, state: Squares) -> Tensor:
        return torch.zeros_like(state.done)

    def loss(self, state: Squares, logits: Tensor) -> Tensor:
        return margin(logits, state.y)

    def update(self, state: Squares, logits: Tensor, gradient: Tensor) -> None:
        right_margin = -margin(logits, state.y)
        lower = right_margin < state.kept_margin
        taken = lower | (right_margin <= 0)
        state.kept[taken] = state.x[taken]  # few rows, so only these are copied
        state.kept_margin = torch.where(lower, right_margin, state.kept_margin)
        state.done = state.step >= self.settings.queries
        side = self.sides[state.step.clamp(max=max(len(self.sides) - 1, 0))] if len(self.sides) else None
        if side is not None:
            state.x = self.change(state, side)
        state.step = state.step + 1

    def best(self, state: Squares) -> tuple[Tensor, Tensor]:
        return state.kept, -state.kept_margin

    def first(self, batch: Batch, number: Tensor) -> Tensor:
        """The images that the searches of these numbers start with."""
        raise NotImplementedError

    def change(self, state: Squares, side: Tensor) -> Tensor:
        """The kept x with a square changed, whose side is given for each search."""
        raise NotImplementedError

    def numbers(self, channels: int) -> int:
        """How many random numbers a query takes."""
        raise NotImplementedError

    def draw(self, state: Squares) -> Tensor:
        """(B, numbers) random numbers in [0, 1) for the next query of each search."""
        turn = state.step % QUERIES_DRAWN
        spent = (turn == 0).nonzero()[:, 0]
        if len(spent):
            apart = self.settings.queries + QUERIES_DRAWN  # so that searches do not share random numbers
            first = rng.key("square") + state.number[spent] * apart + state.step[spent]
            draw = (first[:, None] + torch.arange(QUERIES_DRAWN, device=first.device)).flatten()
            index = state.index[spent].repeat_interleave(QUERIES_DRAWN)
            fresh = rng.uniform(self.seed, index, draw, state.random.shape[2:])
            state.random[spent] = fresh.view(len(spent), *state.random.shape[1:])
        return state.random[torch.arange(len(state), device=turn.device), turn]


class Position(NamedTuple):
    """The position of a square: rows and columns of the image, counted from the square's top left corner."""

    rows: Tensor  # int64 (B, H)
    columns: Tensor  # int64 (B, W)
    side: Tensor  # int64 (B, 1)

    @classmethod
    def random(cls, random: Tensor, side: Tensor, image: Tensor) -> Position:
        """Of squares of these sides, by two random numbers in [0, 1) for each; `image` gives the size of the images."""
        (rows, top), (columns, left) = (
            (torch.arange(length, device=side.device), (random[:, axis] * (length - side + 1)).long())
            for axis, length in enumerate(image.shape[2:])
        )
        return cls(rows - top[:, None], columns - left[:, None], side[:, None])

    def mask(self) -> Tensor:
        """bool (B, 1, H, W)"""
        rows, columns = ((at >= 0) & (at < self.side) for at in (self.rows, self.columns))
        return rows[:, None, :, None] & columns[:, None, None, :]


class PaintedSquares(RandomSquares):
    """linf: a square is set to x0 ± eps, one sign for each channel; the first image has vertical stripes."""

    odd = False

    def first(self, batch: Batch, number: Tensor) -> Tensor:
        channels, _, width = batch.x.shape[1:]
        draw = rng.key("square", "stripes") + number
        stripes = rng.signs(self.seed, batch.index, draw, (channels, 1, width), dtype=batch.x.dtype)
        return (batch.x + self.threat.eps * stripes).clamp(0, 1)

    def numbers(self, channels: int) -> int:
        return 2 + channels

    def change(self, state: Squares, side: Tensor) -> Tensor:
        random = self.draw(state)
        position, signs = Position.random(random[:, :2], side, state.x0), _signs(random[:, 2:], state.x0)
        painted = (state.x0 + self.threat.eps * signs).clamp_(0, 1)
        return torch.where(position.mask(), painted, state.kept)


class MovedSquares(RandomSquares):
    """l2 and l1: the budget of one square is moved to another, which gets a pattern that peaks in its middle."""

    def first(self, batch: Batch, number: Tensor) -> Tensor:
        """The pattern on each of 5×5 tiles, with random signs and orientation."""
        channels, height, width = batch.x.shape[1:]
        side = max(min(height, width) // TILES, 1)
        down, across = height // side, width // side
        draw = rng.key("square", "tiles") + number
        signs = rng.signs(self.seed, batch.index, draw, (channels + 1, down, across), dtype=batch.x.dtype)
        signs = signs[..., None, None]
        shape = pattern(side, self.power).to(batch.x)
        tiles = torch.where(signs[:, :1] > 0, shape, shape.T) * signs[:, 1:]  # (B, C, down, across, side, side)
        laid = tiles.transpose(3, 4).reshape(len(batch.x), channels, down * side, across * side)
        top, left = (height - down * side) // 2, (width - across * side) // 2
        offset = torch.zeros_like(batch.x)
        offset[:, :, top : top + down * side, left : left + across * side] = laid
        return self.inside(batch.x, offset)

    def numbers(self, channels: int) -> int:
        return 5 + channels

    def change(self, state: Squares, side: Tensor) -> Tensor:
        channels = state.x0.shape[1]
        random = self.draw(state)
        to, off = (Position.random(random[:, pair], side, state.x0) for pair in (slice(0, 2), slice(2, 4)))
        square, emptied = to.mask(), off.mask()
        offset = state.kept - state.x0
        here = offset * square
        shape = self._laid(to, upright=random[:, 4] < 0.5).to(offset)
        fresh = square * (_signs(random[:, 5:], offset) * shape + here / (self.size(here) + 1e-12))
        spare = (self.threat.eps**self.order - self.size(offset, whole=True) ** self.order).clamp(min=0)
        budget = spare / channels + self.size(offset * (square | emptied)) ** self.order
        budget = budget.sqrt() if self.threat.norm == "l2" else budget * channels
        fresh = fresh * (budget / (self.size(fresh) + 1e-12))
        return self.inside(state.x0, torch.where(square, fresh, offset * ~emptied))

    @property
    def order(self) -> int:
        return 2 if self.threat.norm == "l2" else 1

    @property
    def power(self) -> int:
        """How fast the pattern decays from its middle."""
        return 2 if self.threat.norm == "l2" else 4

    def _laid(self, position: Position, upright: Tensor) -> Tensor:
        """(B, 1, H, W): the pattern at each search's position; values outside the square are arbitrary."""
        sides = position.side[:, 0]
        distinct = sorted(set(sides.tolist()))  # few: searches that started together have the same side
        largest = distinct[-1]
        bank = torch.zeros(len(distinct), largest, largest, dtype=torch.float64, device=sides.device)
        for number, side in enumerate(distinct):
            bank[number, :side, :side] = pattern(side, self.power)
        which = torch.searchsorted(torch.tensor(distinct, device=sides.device), sides)
        rows, columns = (at.clamp(0, largest - 1) for at in (position.rows, position.columns))
        rows, columns = rows[:, :, None], columns[:, None, :]
        upright = upright[:, None, None]
        first, second = torch.where(upright, rows, columns), torch.where(upright, columns, rows)
        return bank[which[:, None, None], first, second][:, None]

    def size(self, offset: Tensor, *, whole: bool = False) -> Tensor:
        """The norm of each channel, (B, C, 1, 1); with `whole`, of the image, (B, 1, 1, 1)."""
        dims = (1, 2, 3) if whole else (2, 3)
        norms: Tensor = torch.linalg.vector_norm(offset, self.order, dim=dims, keepdim=True)
        return norms

    def inside(self, x0: Tensor, offset: Tensor) -> Tensor:
        """x0 + offset, scaled to the sphere for l2, projected into the ball for l1, and inside the box."""
        if self.threat.norm == "l1":
            return project("l1", x0, x0 + offset, self.threat.eps)
        size = torch.linalg.vector_norm(offset, 2, dim=(1, 2, 3), keepdim=True, dtype=torch.float64)
        moved: Tensor = x0 + offset * (SAFETY * self.threat.eps / (size + 1e-12)).to(x0.dtype)
        return moved.clamp(0, 1)


def _signs(random: Tensor, image: Tensor) -> Tensor:
    """(B, C, 1, 1) of -1 and +1, by random numbers in [0, 1)."""
    return torch.where(random < 0.5, -1.0, 1.0).to(image.dtype)[:, :, None, None]


@cache
def pattern(side: int, power: int) -> Tensor:
    """(side, side): two halves with opposite signs, each with its peak in the middle.

    An entry is Σ 1/(k + 1)^power over the concentric rectangles that contain it, k counted from the innermost; each
    half, then the whole, is scaled to norm 1 (l2 for power 2, l1 for power 4).
    """
    order = 2 if power == 2 else 1
    halves = []
    for height in (side // 2, side - side // 2):
        rows = (torch.arange(height) - height // 2).abs()[:, None]
        columns = (torch.arange(side) - side // 2).abs()[None, :]
        ring = torch.maximum(rows.expand(height, side), columns.expand(height, side))
        rings = 1.0 / torch.arange(1, max(height // 2, side // 2) + 2, dtype=torch.float64) ** power
        tail = rings.flip(0).cumsum(0).flip(0)
        half = tail[ring]
        halves.append(half / torch.linalg.vector_norm(half, order).clamp(min=1e-300) if height else half)
    whole = torch.cat([halves[0], -halves[1]])
    unit: Tensor = whole / torch.linalg.vector_norm(whole, order)
    return unit
