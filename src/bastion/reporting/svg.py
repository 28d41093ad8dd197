"""Matplotlib figures as inline SVG with the page's colours and fonts, for light mode, dark mode and print."""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bastion.errors import printable

COLOURS = 8
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}  # matplotlib's name and the legend's character

# matplotlib draws with placeholder colours, which `inline` replaces by CSS variables.
INK, MUTED, GRID, PAPER = "#000001", "#000002", "#000003", "#000004"
_NUMBER = "\0"  # in ids, for the number of a picture on its page; no text can have it, as it is not printable
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_RUNS = [f"#0001{position:02x}" for position in range(COLOURS)]
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", PAPER: "--paper"} | {
    colour: f"--run-{position}" for position, colour in enumerate(_RUNS)
}
_STYLE = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "bastion",  # the same facts give the same page
    "text.parse_math": False,  # a name may contain a dollar sign
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "figure.facecolor": "none",
}


def marker(number: int) -> str:
    return list(MARKERS)[number % len(MARKERS)]


def colour(number: int) -> str:
    return _RUNS[number % COLOURS]


def line_style(number: int, markersize: float = 7) -> dict[str, Any]:
    """Colour and marker of a run, for matplotlib."""
    return {"color": colour(number), "marker": marker(number), "markersize": markersize, "markeredgecolor": PAPER}


@contextmanager
def panel(
    width: int,
    height: int,
    *,
    left: int,
    right: int,
    top: int = 30,
    bottom: int = 44,
    grid: str = "y",
    projection: str | None = None,
) -> Iterator[Axes]:
    """Create axes within margins, in CSS pixels, with grid lines at the ticks of `grid`: x, y, both or empty."""
    style = _STYLE | {"axes.grid": bool(grid), "axes.grid.axis": grid or "both"}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # matplotlib only measures text; the browser draws it, and has fonts for all characters.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        yield figure.add_axes(box, projection=projection)


def decades(axis: Axis) -> None:
    """Set plain ticks on a logarithmic axis after drawing (0.02, 5, 10⁴), as matplotlib's own are TeX."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    if value <= 0 or 1e-3 <= value < 1e4:
        return f"{value:g}"
    power = math.floor(math.log10(value) + 1e-9)
    factor = f"{value / 10**power:.0f}·" if round(value / 10**power) != 1 else ""
    return f"{factor}10{str(power).translate(_SUPERSCRIPTS)}"


def inline(axes: Axes, title: str, *, styled: bool = True) -> Markup:
    """Convert a panel to an SVG element with the page's colours, a title, no namespaces, and ids for `with_unique_ids`.

    `styled` False: plain attributes instead of style attributes, for pages whose policy forbids those.
    """
    drawn, file = cast(Figure, axes.figure), io.StringIO()
    drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(printable(file.getvalue()))
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): _adapt(name, value) for name, value in element.attrib.items()}
        element.attrib = attributes if styled else _unstyled(attributes)
    for element in root.findall(".//defs"):
        for sheet in element.findall("style"):
            element.remove(sheet)  # it would style the whole page
    width, height = (round(72 * side) for side in drawn.get_size_inches())
    size = {"style": f"max-width: {width}px"} if styled else {"width": str(width)}
    root.attrib = {"viewBox": f"0 0 {width} {height}", **size, "role": "img", "aria-label": title}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _unstyled(attributes: dict[str, str]) -> dict[str, str]:
    pairs = (part.split(":", 1) for part in attributes.pop("style", "").split(";") if part.strip())
    declared = {name.strip(): value.strip() for name, value in pairs}
    if font := re.match(r"(?:(bold|[1-9]00) )?([\d.]+px)", declared.pop("font", "")):  # the page has the family
        declared |= {"font-size": font[2]} | ({"font-weight": font[1]} if font[1] else {})
    return attributes | declared


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _adapt(name: str, value: str) -> str:
    if name == "style":
        return re.sub("#0000[0-9a-f]{2}|#0001[0-9a-f]{2}", lambda match: f"var({_VARIABLES[match[0]]})", value)
    if name == "id":
        return f"svg-{_NUMBER}-{value}"
    if _local(name) in ("href", "clip-path"):
        return value.replace("#", f"#svg-{_NUMBER}-")
    return value


def with_unique_ids(page: str) -> str:
    """Number the pictures of a page in their ids."""
    numbers = itertools.count()
    return re.sub("<svg .*?</svg>", lambda match: match[0].replace(_NUMBER, str(next(numbers))), page, flags=re.DOTALL)
