"""The networks of DeepAugment: trained here to reconstruct the images at hand, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion import rng, storage
from bastion.deepaugment.networks import NETWORKS, Network
from bastion.deepaugment.quality import psnr
from bastion.errors import BastionError
from bastion.progress import bar
from bastion.types import DataSet

STEPS, BATCH, RATE = 600, 16, 2e-3
LARGEST = 64  # pixels: larger images are cropped at random for training
CHECKED = 256  # images that the quality of reconstruction is measured on


def train(name: str, data: DataSet, *, seed: int, steps: int = STEPS) -> Network:
    """A network that reconstructs the training images; the same seed gives the same weights on the same machine."""
    generator = torch.Generator().manual_seed(rng.key("deepaugment", name, seed))
    with rng.preserved():
        rng.reseed("deepaugment", name, seed)
        network = NETWORKS[name](data.shape[0])
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1, pct_start=0.1)
    with bar(f"{name}: learning to reconstruct {data.name}", steps) as advance:
        for _ in range(steps):
            positions = torch.randint(len(data.train), (BATCH,), generator=generator)
            x = _piece(data.train.batch(positions.tolist()).x, generator)
            loss = F.l1_loss(network(network.corrupted(x, generator)), x)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            advance(note=f"error {loss.item():.4f}")
    return network


def _piece(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of images larger than `LARGEST`."""
    top, left = (int(torch.randint(max(1, side - LARGEST + 1), (), generator=generator)) for side in x.shape[2:])
    return x[:, :, top : top + LARGEST, left : left + LARGEST]


@torch.no_grad()
def reconstruction(network: Network, data: DataSet) -> Tensor:
    """(n,): PSNR of reconstructed validation images; of training images if the data set has no validation split."""
    split = data.val if len(data.val) else data.train
    found = []
    for start in range(0, min(CHECKED, len(split)), BATCH):
        x = split.batch(range(start, min(start + BATCH, len(split)))).x
        found.append(psnr(x, network(x).clamp(0, 1)))
    return torch.cat(found)


def save(network: Network, path: Path) -> None:
    (name,) = (name for name, kind in NETWORKS.items() if isinstance(network, kind))
    about = {"name": name, "channels": network.channels, "width": network.width, "blocks": network.blocks}
    arrays = {key: tensor.detach().numpy() for key, tensor in network.state_dict().items()}
    storage.write_arrays(path, arrays, {"deepaugment": json.dumps(about)})


def load(name: str, path: Path, channels: int) -> Network:
    """A network written by `save`; an error if it is of another kind, or for another number of channels."""
    arrays, metadata = storage.read_arrays(path)
    about = json.loads(metadata.get("deepaugment", "{}"))
    if (about.get("name"), about.get("channels")) != (name, channels):
        found = f"a network '{about['name']}' for {about['channels']} channels" if about else "not of DeepAugment"
        raise BastionError(
            f"{path}: {found}; expected weights of '{name}' for {channels} channels that `bastion data deepaugment` "
            "wrote: name another file, or none to train them"
        )
    network = NETWORKS[name](channels, about["width"], about["blocks"])
    network.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()})
    return network
