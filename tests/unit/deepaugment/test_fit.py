"""Networks that are trained here reconstruct images; weights from elsewhere are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bastion import BastionError, storage
from bastion.deepaugment import fit
from bastion.deepaugment.networks import NETWORKS, NOISE, Network
from bastion.deepaugment.quality import psnr
from bastion.types import DataSet


@pytest.mark.parametrize(("name", "least"), [("edsr", 30.0), ("cae", 18.5)])
def test_after_a_second_of_training_images_are_reconstructed(
    name: str, least: float, trained: dict[str, Network], mini: DataSet
) -> None:
    assert fit.reconstruction(trained[name], mini).mean() > least
    assert fit.reconstruction(NETWORKS[name](3), mini).mean() < 16


def test_the_first_network_takes_noise_away(trained: dict[str, Network], mini: DataSet) -> None:
    x = mini.test.batch(range(64)).x
    noisy = trained["edsr"].corrupted(x, torch.Generator().manual_seed(1))
    assert psnr(x, noisy).mean() == pytest.approx(-20 * np.log10(NOISE), abs=0.1)
    with torch.no_grad():
        assert psnr(x, trained["edsr"](noisy)).mean() > psnr(x, noisy).mean() + 1.5


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seed_decides_the_weights(name: str, mini: DataSet) -> None:
    one, again, other = (fit.train(name, mini, seed=seed, steps=3).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_kept_to_the_bit(name: str, trained: dict[str, Network], tmp_path: Path) -> None:
    fit.save(trained[name], tmp_path / "weights.safetensors")
    network = fit.load(name, tmp_path / "weights.safetensors", 3)
    assert (network.width, network.blocks) == (8, 1)
    assert all(torch.equal(value, trained[name].state_dict()[key]) for key, value in network.state_dict().items())


def test_damaged_and_foreign_weights_are_refused_in_one_line(trained: dict[str, Network], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    fit.save(trained["edsr"], path)
    for name, channels, message in (
        ("cae", 3, "a network 'edsr' for 3 channels; expected weights of 'cae' for 3 channels"),
        ("edsr", 1, "a network 'edsr' for 3 channels; expected weights of 'edsr' for 1 channels"),
    ):
        with pytest.raises(BastionError, match=message):
            fit.load(name, path, channels)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(BastionError, match="corrupt: its bytes do not match its SHA-256"):
        fit.load("edsr", path, 3)
    path.write_bytes(content[:-100])
    with pytest.raises(BastionError, match="corrupt or truncated"):
        fit.load("edsr", path, 3)
    torch.save(trained["edsr"].state_dict(), path)
    with pytest.raises(BastionError, match="a pickle, which can run code when it is loaded"):
        fit.load("edsr", path, 3)
    storage.write_arrays(path, {"weight": np.zeros(3)})
    with pytest.raises(BastionError, match="not of DeepAugment; expected weights of 'edsr'"):
        fit.load("edsr", path, 3)
    with pytest.raises(BastionError, match="no such file"):
        fit.load("edsr", tmp_path / "none.safetensors", 3)


def test_large_images_are_trained_on_in_pieces() -> None:
    x = torch.arange(100.0 * 90).reshape(1, 1, 100, 90)
    pieces = [fit._piece(x, torch.Generator().manual_seed(seed)) for seed in range(9)]
    assert {tuple(piece.shape) for piece in pieces} == {(1, 1, 64, 64)}
    assert len({piece[0, 0, 0, 0].item() for piece in pieces}) > 5
    assert torch.equal(fit._piece(x[:, :, :32, :32], torch.Generator()), x[:, :, :32, :32])
