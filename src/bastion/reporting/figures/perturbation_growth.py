"""Growth of a perturbation from block to block, and the bounds by singular values (Wang and Ruan 2022, Eq. 15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, by_case, figures
from bastion.reporting.figures.jacobian import values
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import percent, quantity

CAPTION = (
    "‖Δx‖₂ between an image and its perturbed version, at the input of the first block and after each one; medians "
    "over the images that are classified right, bands hold half of them. Noise is the same perturbation with its "
    "pixels in random order."
)
BOUNDED = (
    "    The bounds begin with the length at the input of the first block: dashed ∏(1 + σ), dotted exp(Σσ) of Eq. 15, "
    "with σ of the branch F at the clean image; where a block changes the shape, with σ of the block. They hold to "
    "first order, and what is between blocks counts as measured. Images above are those whose perturbation is "
    "somewhere longer than ∏(1 + σ)."
)
UNBOUNDED = (
    " With the probe jacobian in the suite, and its parts branch and block, the bounds of Eq. 15 stand beside it."
)

APART = 0.075  # distance between labels of lines, relative to the height of a panel
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
SLACK = 1.001  # for rounding and for the tolerance of singular values


@dataclass(frozen=True)
class Growth:
    """(n, 1 + blocks) each, of the images that were attacked."""

    attacked: Column
    noise: Column
    product: Column | None = None  # bounds
    exponential: Column | None = None


@figures.register("perturbation-growth")
@by_case
def perturbation_growth(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    grown = [growth(row.facts, case) for row in table.rows]
    panels = [_panel(row, each) for row, each in zip(table.rows, grown, strict=True) if len(each.attacked)]
    bounded = any(each.product is not None for each in grown)
    title = f"{case.label}: growth of perturbations" + (f", {case.threat}" if case.threat else "")
    return [Figure(title, panels, CAPTION + (BOUNDED if bounded else UNBOUNDED), _table(table, grown, bounded=bounded))]


def growth(facts: Facts, case: MeasuredCase) -> Growth:
    attacked, noise, entering = (
        facts.columns[f"{case.label}/{name}"].astype(np.float64) for name in ("attacked", "noise", "entering")
    )
    moved = np.isfinite(attacked).all(1) & (attacked[:, 0] > 0)
    bounds = _bounds(facts, attacked, entering)
    return Growth(attacked[moved], noise[moved], *(each[moved] for each in bounds))


def _bounds(facts: Facts, attacked: Column, entering: Column) -> list[Column]:
    """∏(1 + σ) and exp(Σσ) times the length at the input, by block; empty without the σ of a block."""
    found = [case for case in facts.about.cases if case.spec.get("name") == "jacobian" and "branch" in case.columns]
    if not found:
        return []
    branch = values(facts, found[0], "branch")
    if branch.shape != entering.shape:
        return []
    block = values(facts, found[0], "block") if "block" in found[0].columns else np.full_like(branch, np.nan)
    if np.isnan(np.fmax(branch, block)).all(0).any():
        return []
    between = entering / attacked[:, :-1]  # 1, unless there are layers between two blocks
    first = attacked[:, :1]
    with np.errstate(over="ignore"):  # exp of a large value is infinite, as a bound may be
        factors = (np.where(np.isnan(branch), block, each) for each in (1 + branch, np.exp(branch)))
        return [np.hstack([first, first * np.cumprod(between * each, axis=1)]) for each in factors]


def _panel(row: TableRow, grown: Growth) -> Markup:
    with svg.panel(360, 270, left=46, right=82, top=36) as axes:
        axes.set_title(row.name, x=-0.2, pad=12)
        axes.set(yscale="log", xlabel="blocks passed")
        paint = svg.colour(row.run.number)
        blocks = np.arange(grown.attacked.shape[1])
        low, high = np.quantile(grown.attacked, [0.25, 0.75], axis=0)
        axes.fill_between(blocks, low, high, color=paint, alpha=0.2, linewidth=0)
        lines = {
            "attacked": (grown.attacked, paint, "-", 2.2),
            "noise": (grown.noise, svg.MUTED, "-", 1.4),
            "∏(1 + σ)": (grown.product, paint, (0, (5, 3)), 1.6),
            "exp Σσ": (grown.exponential, paint, (0, (1, 2)), 1.8),
        }
        ends = []
        for name, (column, colour, style, width) in lines.items():
            if column is not None:
                middle = np.median(column, axis=0)
                finite = np.isfinite(middle)
                axes.plot(blocks[finite], middle[finite], color=colour, linestyle=style, linewidth=width)
                ends.append((float(middle[finite][-1]), name))
        _name_ends(axes, ends)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_xlim(0, blocks[-1])
        svg.decades(axes.yaxis)
        return svg.inline(axes, f"{row.name}: length of the perturbation after each block")


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str]]) -> None:
    """Label the lines at their right ends, without overlap."""
    low, high = np.log(axes.get_ylim())
    lowest = -1.0
    for value, name in sorted(ends):
        lowest = max(lowest + APART, (np.log(value) - low) / (high - low))
        axes.annotate(name, (1.03, lowest), xycoords="axes fraction", va="center", fontsize=11, annotation_clip=False)


def _table(table: SharedTable, grown: Sequence[Growth], *, bounded: bool) -> Table:
    head = ["run", "images", "attacked", "noise"]
    head += ["∏(1 + σ)", "exp Σσ", "∏(1 + σ) / measured", "images above"] if bounded else []
    return Table(head, [(row.name, _cells(each)) for row, each in zip(table.rows, grown, strict=True)])


def _cells(grown: Growth) -> list[str]:
    """Medians over the images."""
    if not len(grown.attacked):
        return ["0"]
    cells = [str(len(grown.attacked)), _gain(grown.attacked), _gain(grown.noise)]
    if grown.product is None or grown.exponential is None:
        return cells
    loose = np.median(grown.product[:, -1] / grown.attacked[:, -1])
    known = not np.isnan(grown.product).any()
    above = f"{percent((grown.attacked > SLACK * grown.product).any(1).mean())} %" if known else "–"
    return [*cells, _gain(grown.product), _gain(grown.exponential), _number(float(loose)), above]


def _gain(column: Column) -> str:
    return f"× {_number(float(np.median(column[:, -1] / column[:, 0])))}"


def _number(value: float) -> str:
    """A number that may be huge: 142.5, 4.7·10⁵, ∞."""
    if np.isinf(value):
        return "∞"
    if not value >= 1e4:  # or NaN
        return quantity(value)
    power = int(np.log10(value))
    return f"{value / 10**power:.1f}·10{str(power).translate(SUPERSCRIPTS)}"
