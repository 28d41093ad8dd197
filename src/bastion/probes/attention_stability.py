"""Change of attention maps when some patches are occluded (Guo et al. 2023, Figs. 2, 4 and 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import journal
from bastion.acceleration import accelerate
from bastion.attacks.patch import attention_taps, on_patch_grid
from bastion.errors import BastionError
from bastion.forward import check_batch
from bastion.patches import Grid, token_grid
from bastion.probes import probes
from bastion.probes.occluded import OccludedProbe
from bastion.settings import settings
from bastion.types import Batch, tapped


@probes.register("attention-stability")
@settings
class AttentionStability(OccludedProbe):
    """Cosine similarity of the attention maps of the clean and the occluded image, for each head of each layer.

    Layers are the blocks with self-attention between tokens, in windows or between channels, without class attention.
    A head's map, over all queries, keys and windows, is taken as one vector.
    """

    name = "attention-stability"
    revision: ClassVar[int] = 2
    facts: ClassVar[Mapping[str, str]] = {
        "similarity": "cosine similarity of clean and occluded attention, mean over heads, layers and masks",
        "lowest": "the lowest over the masks of the mean over heads and layers",
        "similarity_by_head": "by layer and head, mean over the masks; NaN where a layer has fewer heads than another",
        "similarity_by_mask": "by mask, mean over heads and layers",
        **journal.PASSES,
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        accelerated = accelerate(model)
        given, batch = check_batch(model, batch, "probe attention-stability")
        batch, grid = self.at_mask_size(given, batch)
        parts: list[dict[str, Tensor]] = []
        with journal.opened() as notes, accelerated.ready(batch.x):
            for positions, chunks in self.full_batches(batch, accelerated.batch_size):
                parts.append(self._compare(given, batch.select(positions), grid, chunks, seed=seed))
        facts = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {**facts, **notes.passes(batch.index), "clean": batch.x}

    def _compare(
        self, model: nn.Module, batch: Batch, grid: Grid, chunks: list[range], *, seed: int
    ) -> dict[str, Tensor]:
        """The facts of some examples, and images and attention maps under the first mask."""
        clean = attention_maps(model, batch)
        compared, pictures = [], {}
        for numbers in chunks:
            shown = self.occluded(batch, grid, numbers, seed=seed)
            maps = attention_maps(model, shown)
            compared.append(similarities(clean, maps))
            if 0 in numbers:
                first = {name: attention[: len(batch.x)] for name, attention in maps.items()}
                pictures = {"occluded": shown.x[: len(batch.x)]}
                pictures |= _pictures(model, {"clean": clean, "occluded": first}, batch.x)
        similarity = torch.cat(compared).transpose(0, 1).float()  # (B, masks, layers, heads)
        by_mask = similarity.flatten(2).nanmean(2)
        return {
            "similarity": by_mask.mean(1),
            "lowest": by_mask.amin(1),
            "similarity_by_head": similarity.mean(1),
            "similarity_by_mask": by_mask,
            **pictures,
        }


def attention_maps(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The maps (B, windows, heads, queries, keys) of every block with self-attention, by name and in order."""
    where = "probe attention-stability"
    with torch.no_grad():
        _, taps = attention_taps(model, batch.x, where)
    journal.passes(batch.index, 1, 0)
    attending = [
        block.name for block in tapped(model, where).blocks() if block.attends and block.name in taps.attention
    ]
    if not attending:
        raise BastionError(
            f"{where}: no block of the model has self-attention; leave the probe out of the suite "
            "(--set probes.LABEL=null)"
        )
    maps = {name: taps.attention[name] for name in attending}
    return {name: each.reshape(len(batch.x), -1, *each.shape[1:]) for name, each in maps.items()}


def similarities(clean: dict[str, Tensor], occluded: dict[str, Tensor]) -> Tensor:
    """(masks, B, layers, heads): cosine similarity of the maps of clean images and of the same images under each mask.

    Layers with fewer heads are padded with NaN.
    """
    heads = max(attention.shape[2] for attention in clean.values())
    layers = []
    for name, attention in clean.items():
        before = attention.transpose(1, 2).flatten(2)  # (B, heads, windows · queries · keys)
        after = occluded[name].transpose(1, 2).flatten(2).reshape(-1, *before.shape)
        cosine = F.cosine_similarity(before, after, dim=3)
        layers.append(F.pad(cosine, (0, heads - cosine.shape[2]), value=torch.nan))
    return torch.stack(layers, 2)


def centre_attention(maps: Iterable[Tensor], x: Tensor) -> Tensor:
    """(B, layers, rows, columns): the attention of the token in the middle of the image, mean over heads.

    Maps are (B, 1, heads, queries, keys) between tokens of the image, resized to the finest grid among them.
    """
    found = []
    for attention in maps:
        queries = attention.shape[3]
        rows, columns = token_grid(queries, *x.shape[2:])
        centre = queries - rows * columns + (rows // 2) * columns + columns // 2
        found.append(on_patch_grid(attention[:, 0, :, centre].mean(1, keepdim=True), x))
    finest = max((each.shape[2:] for each in found), key=math.prod)
    return torch.cat([F.interpolate(each, finest, mode="nearest") for each in found], 1)


def _pictures(model: nn.Module, maps: Mapping[str, Mapping[str, Tensor]], x: Tensor) -> dict[str, Tensor]:
    """Attention of the centre in layers with attention between all tokens, not in windows or between channels."""
    kinds = {block.name: block.attention for block in tapped(model, "probe attention-stability").blocks()}
    shown = {
        f"attention_{name}": [each for block, each in of.items() if kinds[block] == "tokens" and each.shape[1] == 1]
        for name, of in maps.items()
    }
    return {name: centre_attention(layers, x).half() for name, layers in shown.items() if layers}
