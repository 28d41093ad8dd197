"""Similarity of attention on clean and occluded images (Guo et al. 2023, Fig. 5), and in pictures (Figs. 2, 4)."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import strips, svg
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.histograms import Histogram, histogram
from bastion.reporting.pictures import run_mark, to_bytes
from bastion.reporting.plots import HEIGHT, WIDTH
from bastion.reporting.strips import Tile
from bastion.reporting.tables import SharedTable

MANY = 50  # masks for a histogram of a single image
EXAMPLES = 2
COLOURS = "inferno"
ENLARGED = 128  # pixels of a picture in which the centre is marked
SQUARE = (224, 30, 38)


@figures.register("attention-stability")
@by_case
def attention_stability(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    figure, heads = _similarities(table, case), _heads(table, case)
    return [figure, heads, *_over_masks(table, case), *_pictures(table, case)]


def _similarities(table: SharedTable, case: MeasuredCase) -> Figure:
    masks = fact(table.rows[0], case, "similarity_by_mask").shape[1]
    panels = [_histogram([fact(row, case, "similarity") for row in table.rows], table, "images"), _layers(table, case)]
    drawn = "one mask" if masks == 1 else f"{masks} masks"
    return Figure(
        f"{case.label}: attention on clean and on occluded images",
        panels,
        f"Cosine similarity of the attention maps of each head, {drawn} for each image. The histogram is of its mean "
        "over heads and layers; dashed lines are means over the images, triangles the lowest. By layer, it is the mean "
        "over heads; bands hold 90 % of the images.",
        _table(table, case),
    )


def _histogram(by_row: Sequence[Column], table: SharedTable, title: str) -> Markup:
    shown = [
        Histogram(row.run.number, values, float(values.mean()), float(values.min()))
        for row, values in zip(table.rows, by_row, strict=True)
    ]
    return histogram(shown, title, "cosine similarity of attention")


def _layers(table: SharedTable, case: MeasuredCase) -> Markup:
    with svg.panel(WIDTH, HEIGHT, left=46, right=14, top=34) as axes:
        axes.set_title("cosine similarity", x=-0.13, pad=10)
        for row in table.rows:
            by_layer = np.nanmean(fact(row, case, "similarity_by_head"), axis=2)  # (n, layers)
            layers, paint = np.arange(1, by_layer.shape[1] + 1), svg.colour(row.run.number)
            low, high = np.quantile(by_layer, [0.05, 0.95], axis=0)
            axes.fill_between(layers, low, high, color=paint, alpha=0.15, linewidth=0)
            axes.plot(layers, by_layer.mean(0), linewidth=2, clip_on=False, **svg.line_style(row.run.number))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(top=1)
        axes.set_xlabel("attention layer, from input to output")
        return svg.inline(axes, f"{case.label}: cosine similarity of attention by layer")


def _heads(table: SharedTable, case: MeasuredCase) -> Figure:
    """A heat map of layers and heads for each model."""
    means = [fact(row, case, "similarity_by_head").mean(0) for row in table.rows]  # (layers, heads)
    low, high = min(map(np.nanmin, means)), max(map(np.nanmax, means))
    panels = []
    for row, mean in zip(table.rows, means, strict=True):
        with svg.panel(WIDTH, HEIGHT, left=46, right=14, top=34, grid="") as axes:
            axes.set_title(row.name, x=-0.13, pad=10)
            layers, heads = (np.arange(count + 1) + 0.5 for count in mean.shape)
            axes.pcolormesh(layers, heads, np.ma.masked_invalid(mean.T), cmap="viridis", vmin=low, vmax=high)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="attention layer, from input to output", ylabel="head")
            panels.append(svg.inline(axes, f"{row.name}: similarity of attention by layer and head"))
    return Figure(
        f"{case.label}: attention by layer and head",
        panels,
        f"Cosine similarity, mean over the images, from {low:.3f} (dark) to {high:.3f} (bright), on one scale for all "
        "models. Blank where a layer has fewer heads than another.",
        legend=False,
    )


def _table(table: SharedTable, case: MeasuredCase) -> Table:
    rows = []
    for row in table.rows:
        values, by_head = fact(row, case, "similarity"), fact(row, case, "similarity_by_head")
        shown = row.facts.estimate(values)
        heads = sorted({int(np.isfinite(layer).sum()) for layer in by_head[0]})
        cells = [
            f"{shown.value:.3f}" + (f" ({shown.low:.3f}–{shown.high:.3f})" if np.isfinite(shown.low) else ""),
            f"{np.quantile(values, 0.05):.3f}",
            f"{values.min():.3f}",
            f"{by_head.shape[1]} × {heads[0] if len(heads) == 1 else f'{heads[0]} to {heads[-1]}'}",
        ]
        rows.append((row.name, cells))
    return Table(["run", "mean", "5 % of images below", "lowest", "layers × heads"], rows)


def _over_masks(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """Fig. 4, last column: single images under many masks."""
    masks = fact(table.rows[0], case, "similarity_by_mask").shape[1]
    if masks < MANY:
        return []
    by_row = [fact(row, case, "similarity_by_mask") for row in table.rows]
    panels = [
        _histogram([values[place] for values in by_row], table, f"{name}: masks")
        for place, name in enumerate(strips.first_images(table, case, EXAMPLES))
    ]
    caption = "Mean over heads and layers; dashed lines are means over the masks, triangles the lowest."
    return [Figure(f"{case.label}: one image under {masks} masks", panels, caption)]


def _pictures(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """Figs. 2 and 4: the same images in every model."""
    first = strips.shared_pictures(table, case, EXAMPLES)
    panels, silent = [], []
    for number, truth in enumerate(first.truths):
        for line, row in enumerate(table.rows):
            pictures = {name: column[number] for name, column in first.rows[line].items()}
            if "attention_clean" not in pictures:
                silent.append(row.name)
                continue
            position, place = first.positions[number], first.row_numbers[number]
            by_layer = np.nanmean(fact(row, case, "similarity_by_head")[place], axis=1)
            title = Markup("{} {}: {} (image {})").format(run_mark(row.run.number), row.name, truth, position)
            panels.append(_maps(pictures, by_layer, title, f"Attention of {row.name} on image {position}"))
    if not panels:
        return []
    caption = (
        "How the query in the middle of the image (red square) attends to it, mean over heads, layer by layer; "
        "brighter is more, on one scale for the two pictures of a layer. Numbers are cosine similarities of whole maps."
    )
    if silent:
        caption += f" No layer of {', '.join(dict.fromkeys(silent))} attends over the whole image."
    return [Figure(f"{case.label}: attention of the centre", panels, caption, legend=False, wraps=True)]


def _maps(pictures: dict[str, Column], by_layer: Column, title: Markup, name: str) -> Markup:
    """Two rows, clean and occluded: the image, then its attention in each layer."""
    clean, occluded = (pictures[f"attention_{row}"].astype(np.float64) for row in ("clean", "occluded"))
    layers = len(clean)
    numbers = by_layer if len(by_layer) == layers else None  # layers without a picture have similarities too
    top = np.maximum(clean, occluded).max(axis=(1, 2))
    rows = []
    for row, maps in (("clean", clean), ("occluded", occluded)):
        tiles = [Tile(_marked(pictures[row], clean.shape[1:]), f"The {row} image, its centre marked")]
        for layer in range(layers):
            below = f"{numbers[layer]:.2f}" if row == "occluded" and numbers is not None else ""
            tiles.append(Tile(_heat(maps[layer], top[layer]), f"Layer {layer + 1}, {row} image", below))
        rows.append((row, tiles))
    return strips.table(["", *(f"layer {layer + 1}" for layer in range(layers))], rows, title, name)


def _heat(attention: Column, top: float) -> Column:
    """(3, rows, columns) bytes."""
    colours = matplotlib.colormaps[COLOURS](attention / max(top, 1e-12), bytes=True)
    return np.ascontiguousarray(colours[..., :3].transpose(2, 0, 1))


def _marked(image: Column, grid: tuple[int, ...]) -> Column:
    """(3, H, W) bytes of an image with a square around the middle cell of a grid."""
    times = max(1, ENLARGED // image.shape[1])
    pixels = to_bytes(np.broadcast_to(image, (3, *image.shape[1:]))).repeat(times, 1).repeat(times, 2)
    height, width = pixels.shape[1:]
    top, left = ((grid[0] // 2) * height // grid[0], (grid[1] // 2) * width // grid[1])
    bottom, right = top + height // grid[0], left + width // grid[1]
    line, colour = max(1, ENLARGED // 40), np.array(SQUARE, np.uint8)[:, None, None]
    framed = pixels.copy()
    framed[:, top:bottom, left:right] = colour
    inside = np.s_[:, top + line : bottom - line, left + line : right - line]
    framed[inside] = pixels[inside]
    return framed
