"""Stateless random numbers: a pure function of (seed, example index, draw, element).

No generator is advanced, so batch size, order, worker count and interruptions change no number. Each
number is a 64-bit hash of its key; the mixing step is the finaliser of SplitMix64 (Steele et al. 2014),
a bijection of 64-bit words that passes the usual test batteries as a counter-based generator.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

Draw = int | str | Tensor  # Tensor: one draw number per example, int64 (B,)


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word


_WEYL = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads consecutive counters
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic on int64."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(word: Tensor) -> Tensor:
    # In place where possible: allocation is most of the cost of large draws.
    word = _shift(word, 30).bitwise_xor_(word).mul_(_MIX1)
    word = _shift(word, 27).bitwise_xor_(word).mul_(_MIX2)
    return _shift(word, 31).bitwise_xor_(word)


def key(*parts: int | str) -> int:
    """Hash names and numbers to an int64, the same on every machine: `key("apgd", target, restart)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _example_keys(seed: int, index: Tensor, draw: Draw) -> Tensor:
    """Return (B,): one key per example."""
    number = key(draw) if isinstance(draw, str) else draw
    start = torch.tensor(key("seed", seed), device=index.device)
    return _mix(_mix(_mix(start) + index.long() * _WEYL) + (number * torch.tensor(_WEYL, device=index.device)))


@functools.lru_cache(maxsize=8)  # consecutive draws have the same shape: saves half of their cost
def _element_words(count: int, device: torch.device) -> Tensor:
    return _mix((torch.arange(count, device=device) + 1) * _WEYL)


def bits(seed: int, index: Tensor, draw: Draw, shape: Sequence[int] = ()) -> Tensor:
    """Return (B, *shape) int64 of 64 random bits."""
    # The element is hashed before it is combined with the key, so that no two examples share a shifted stream.
    words = _mix(_example_keys(seed, index, draw)[:, None] ^ _element_words(math.prod(shape), index.device)[None, :])
    return words.reshape(len(index), *shape)


def uniform(
    seed: int,
    index: Tensor,
    draw: Draw,
    shape: Sequence[int] = (),
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (B, *shape) in [low, high); 24 random bits for float32, 53 for float64."""
    width = 53 if dtype == torch.float64 else 24
    unit = _shift(bits(seed, index, draw, shape), 64 - width).to(dtype) * 2.0**-width
    return unit if (low, high) == (0.0, 1.0) else low + (high - low) * unit


def normal(
    seed: int, index: Tensor, draw: Draw, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (B, *shape) standard normal, by Box and Muller in float64 on the two halves of one word."""
    words = bits(seed, index, draw, shape)
    radius = (-2.0 * ((_shift(words, 32).double() + 1.0) * 2.0**-32).log()).sqrt()
    angle = (2.0 * math.pi * 2.0**-32) * (words & 0xFFFFFFFF).double()
    return (radius * angle.cos()).to(dtype)


def integers(seed: int, index: Tensor, draw: Draw, shape: Sequence[int] = (), *, low: int = 0, high: int) -> Tensor:
    """Return (B, *shape) int64 in {low, …, high - 1}; `high - low` at most 2^31, bias below 2^-32 each."""
    if not 0 < high - low <= 1 << 31:
        raise ValueError(f"integers: need 1 to 2^31 values, got {high - low} (low {low}, high {high})")
    return low + ((_shift(bits(seed, index, draw, shape), 32) * (high - low)) >> 32)


def signs(
    seed: int, index: Tensor, draw: Draw, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (B, *shape) of -1 and +1."""
    return (1 - 2 * _shift(bits(seed, index, draw, shape), 63)).to(dtype)


def permutation(seed: int, draw: int | str, length: int) -> Tensor:
    """Return a random order of 0 … length-1."""
    return torch.argsort(bits(seed, torch.arange(length), draw), stable=True)


def reseed(*parts: int | str) -> None:
    """Seed the global generators of torch, numpy and random by `parts`.

    For code that uses them, such as timm's transforms and dropout. Call it inside `preserved()`.
    """
    seed = key(*parts) & 0xFFFFFFFF
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)


def state() -> tuple[object, ...]:
    """Return the state of the global generators, which changes with every draw."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    words = (each.numpy().tobytes() for each in (torch.get_rng_state(), *on_gpu))
    return (*words, repr(np.random.get_state(legacy=False)), random.getstate())


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the global generators after the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if gpu else []
    try:
        yield
    finally:
        if devices:
            torch.cuda.set_rng_state_all(devices)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
