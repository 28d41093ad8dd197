"""Formats numbers and names for a page. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import NORM_SIGNS
from bastion.suite import written


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}" if math.isfinite(fraction) else "–"


def points(fraction: float) -> str:
    """Format a difference of accuracies in percentage points, with its sign."""
    return f"{100 * fraction:+.1f}".replace("-", "−")


def interval(estimate: Estimate) -> str:
    return f"{percent(estimate.low)}–{percent(estimate.high)}"


def with_interval(estimate: Estimate) -> str:
    """`57.7 % (51.7–63.7)`; a single example has no interval."""
    return f"{percent(estimate.value)} %" + (f" ({interval(estimate)})" if math.isfinite(estimate.low) else "")


def share_cell(estimate: Estimate) -> Markup:
    """Format a table cell: a share in percent above its interval, clipped to [0, 1]; perhaps the interval alone."""
    inside = estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))
    value = f"{percent(estimate.value)} %" if math.isfinite(estimate.value) else ""
    return Markup("<b>{}</b><small>{}</small>").format(value, interval(inside))


def quantity_cell(estimate: Estimate) -> Markup:
    """Format a table cell: a number of any magnitude above its interval."""
    value, low, high = map(quantity, estimate[:3])
    return Markup("<b>{}</b><small>{} to {}</small>").format(value, low, high)


def quantity(value: float) -> str:
    """Format a number of any magnitude with four digits."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def count(number: float) -> str:
    """Format a large number: 696 k, 11.2 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}\u00a0{unit}"
    return f"{number:.3g}"


def amount(number: float) -> str:
    """Format a number of any magnitude, large ones like `count`."""
    return count(number) if abs(number) >= 1e4 else quantity(number)


def radius(value: float, norm: str) -> str:
    """Format an ℓ∞ radius as `8/255`, others with three digits."""
    if not math.isfinite(value):
        return "∞"
    if norm == "linf":
        return written(value) if written(value).endswith("/255") else f"{255 * value:.3g}/255"
    return f"{value:.3g}"


def norm_sign(norm: str) -> str:
    return NORM_SIGNS.get(norm, norm)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
