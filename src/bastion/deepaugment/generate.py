"""DeepAugment's copies of a data set's training images, as .npz files for `extra` of a recipe.

A copy is a function of the network, the seed and the image's position, so the file has the same bytes however often
its making is stopped and resumed.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bastion import rng, storage
from bastion.deepaugment import fit
from bastion.deepaugment.distortions import distorted
from bastion.deepaugment.networks import NETWORKS, Network
from bastion.deepaugment.quality import psnr, ssim
from bastion.errors import BastionError
from bastion.progress import bar
from bastion.recipe import differences
from bastion.storage import Arrays
from bastion.types import DataSet, Split

VERSION = 1  # raised when the same settings give other images
GROUP = 16  # consecutive images that share a distorted network
PART = 64 * GROUP  # images stored in one file before they are joined
MIN_SSIM = 0.45  # below this structural similarity to the original, another distortion is drawn
ATTEMPTS = 6  # after these, the image is reconstructed without distortions
MIN_PSNR = 18.0  # dB: a network with a lower mean PSNR is not used
PIXELS = 1 << 20  # most pixels that pass through a network at once
CARD = "deepaugment.json"


@dataclass(frozen=True)
class Copies:
    """The copies made by one network, and their similarity to the originals."""

    path: Path
    plain: float  # mean PSNR of the network without distortions
    psnr: Tensor
    ssim: Tensor
    attempt: Tensor  # number of the attempt that gave each copy

    def __str__(self) -> str:
        def spread(values: Tensor, digits: int) -> str:
            low, high = values.quantile(0.05).item(), values.quantile(0.95).item()
            return f"{values.mean().item():.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

        again, never = ((self.attempt >= limit).float().mean().item() for limit in (1, ATTEMPTS))
        return (
            f"{self.path}: {len(self.psnr):,} images; PSNR {spread(self.psnr, 1)} dB, SSIM {spread(self.ssim, 2)}; "
            f"{again:.1%} drawn again, {never:.1%} left undistorted; the network itself {self.plain:.1f} dB"
        )


def deepaugment(
    data: DataSet,
    folder: Path,
    *,
    weights: Mapping[str, Path] | None = None,
    limit: int | None = None,
    steps: int = fit.STEPS,
    seed: int = 0,
) -> list[Copies]:
    """Copies of the training images of `data`, or the first `limit` of them, in `folder/NETWORK.npz`.

    Networks are read from `weights`, or trained for `steps` steps, and stored in `folder/NETWORK.safetensors`.
    """
    count = len(data.train) if limit is None else min(limit, len(data.train))
    if count < 1:
        raise BastionError(f"deepaugment: there are {len(data.train)} training images of {data.name}, {count} to use")
    split = data.train.subset(range(count))
    _claim(folder, {"version": VERSION, "data": data.fingerprint, "images": count, "seed": seed, "steps": steps})
    done = []
    for name in NETWORKS:
        network = _network(name, data, folder, (weights or {}).get(name), seed, steps)
        plain = fit.reconstruction(network, data).mean().item()
        if plain < MIN_PSNR:
            raise BastionError(
                f"deepaugment: {folder / name}.safetensors reconstructs {data.name} with a PSNR of {plain:.1f} dB, "
                f"less than {MIN_PSNR:g}; take another folder, and train for more steps or name other weights"
            )
        path = folder / f"{name}.npz"
        if not path.exists():
            _join(_make_parts(Distorter(network, name, seed), split, folder / f"{name}.parts"), len(split), path)
        shutil.rmtree(folder / f"{name}.parts", ignore_errors=True)
        done.append(_copies(path, plain))
    return done


def _claim(folder: Path, made_with: dict[str, Any]) -> None:
    """Write the card of a new folder; an error if the folder was made with other settings, or holds other files."""
    card = folder / CARD
    storage.remove_leftovers(folder)
    if storage.is_file(card):
        if lines := differences(storage.read_json(card), made_with):
            raise BastionError(f"deepaugment: {folder} was made otherwise ({'; '.join(lines)}); give another folder")
    elif storage.files(folder, "*"):
        raise BastionError(f"deepaugment: {folder} holds other files; give a new folder")
    else:
        storage.write_json(card, made_with)


def _network(name: str, data: DataSet, folder: Path, given: Path | None, seed: int, steps: int) -> Network:
    """The network stored in the folder, the given one, or a newly trained one; it is stored before it is used."""
    path, channels = folder / f"{name}.safetensors", data.shape[0]
    stored = fit.load(name, path, channels) if storage.is_file(path) else None
    if given is None and stored is not None:
        return stored
    network = fit.load(name, given, channels) if given else fit.train(name, data, seed=seed, steps=steps)
    if stored is None:
        fit.save(network, path)
    elif not _equal(stored, network):
        raise BastionError(f"deepaugment: {folder} was made with other weights than {given}; give another folder")
    return network


def _equal(one: Network, other: Network) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@dataclass(frozen=True)
class Distorter:
    """Makes copies of images by a network with other distortions for each group of images."""

    network: Network
    name: str
    seed: int

    @torch.no_grad()
    def __call__(self, x: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Copies of a group of images that are similar enough to the originals, and the attempt (B,) that gave each."""
        made, attempts, left = torch.empty_like(x), torch.full((len(x),), ATTEMPTS), torch.arange(len(x))
        for attempt in range(ATTEMPTS):
            generator = torch.Generator().manual_seed(rng.key("deepaugment", self.name, self.seed, group, attempt))
            made[left] = _through(distorted(self.network, generator), x[left])
            similar = ssim(x[left], made[left]) >= MIN_SSIM
            attempts[left[similar]] = attempt
            left = left[~similar]
            if not len(left):
                return made, attempts
        made[left] = _through(self.network, x[left])
        return made, attempts


def _through(network: nn.Module, x: Tensor) -> Tensor:
    """The network's output, rounded to 8-bit pixels."""
    parts = torch.split(x, max(1, PIXELS // (x.shape[2] * x.shape[3])))
    return torch.cat([(255 * network(part)).clamp(0, 255).round() / 255 for part in parts])


def _make_parts(distorter: Distorter, split: Split, folder: Path) -> list[Path]:
    """Write files of `PART` copies each; existing ones are kept."""
    starts = {start: folder / f"{start:08d}.safetensors" for start in range(0, len(split), PART)}
    open_ = {start: path for start, path in starts.items() if not path.exists()}
    left = sum(min(PART, len(split) - start) for start in open_)
    with bar(f"{distorter.name}: distorting", len(split), len(split) - left) as advance:
        for start, path in open_.items():
            groups = range(start, min(start + PART, len(split)), GROUP)
            made = [_group(distorter, split, first, min(first + GROUP, len(split)), advance) for first in groups]
            storage.write_arrays(path, {key: np.concatenate([each[key] for each in made]) for key in made[0]})
    return list(starts.values())


def _group(distorter: Distorter, split: Split, first: int, last: int, advance: Any) -> Arrays:
    batch = split.batch(range(first, last))
    made, attempt = distorter(batch.x, first // GROUP)
    advance(last - first)
    return {
        "image": (255 * made).round().to(torch.uint8).permute(0, 2, 3, 1).numpy(),
        "label": batch.y.numpy(),
        "index": batch.index.numpy(),  # in the data set
        "psnr": psnr(batch.x, made).numpy(),
        "ssim": ssim(batch.x, made).numpy(),
        "attempt": attempt.numpy(),
    }


def _join(parts: Sequence[Path], count: int, path: Path) -> None:
    """Join the parts to one .npz file, one part at a time, as all may not fit into memory."""
    first = storage.read_arrays(parts[0])[0]
    with storage.atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as file:
        for key in sorted(first):
            with file.open(f"{key}.npy", "w", force_zip64=True) as member:
                header = np.lib.format.header_data_from_array_1_0(first[key]) | {
                    "shape": (count, *first[key].shape[1:])
                }
                np.lib.format.write_array_header_1_0(member, header)
                for part in parts:
                    member.write(storage.read_arrays(part, [key])[0][key].tobytes())


def _copies(path: Path, plain: float) -> Copies:
    try:
        with path.open("rb") as raw, np.load(raw) as file:
            return Copies(path, plain, *(torch.from_numpy(file[key]) for key in ("psnr", "ssim", "attempt")))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BastionError(f"{path}: damaged ({error}); remove it and run the same command again") from error
