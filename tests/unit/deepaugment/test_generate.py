"""The copies are recognisable but changed, have their labels, and are the same bytes however they were made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bastion import BastionError, storage
from bastion.data import datasets
from bastion.data.pool import build_extra
from bastion.deepaugment import fit, generate
from bastion.deepaugment.generate import ATTEMPTS, GROUP, MIN_SSIM, Copies, Distorter, deepaugment
from bastion.deepaugment.networks import NETWORKS, Network
from bastion.deepaugment.quality import psnr, ssim
from bastion.recipe import Extra
from bastion.types import DataSet

COUNT = 5 * GROUP + 3
NAMES = [f"{name}.npz" for name in NETWORKS]


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "PART", GROUP)
        patch.setattr(fit, "CHECKED", 32)
        yield


@pytest.fixture(scope="module")
def weights(trained: dict[str, Network], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    for name, network in trained.items():
        fit.save(network, folder / name)
    return {name: folder / name for name in trained}


Make = Callable[..., list[Copies]]


@pytest.fixture(scope="module")
def make(mini: DataSet, weights: dict[str, Path]) -> Make:
    def make(folder: Path, **settings: Any) -> list[Copies]:
        return deepaugment(mini, folder, **{"weights": weights, "limit": COUNT, **settings})

    return make


@pytest.fixture(scope="module")
def whole(make: Make, _small_parts: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was made at one go; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "made"
    make(folder)
    return folder


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_images_are_copies_of_training_images_with_their_labels(make: Make, mini: DataSet, whole: Path) -> None:
    for copies in make(whole):
        with np.load(copies.path) as file:
            arrays = dict(file)
        original = mini.train.batch(range(COUNT))
        made = torch.from_numpy(arrays["image"]).permute(0, 3, 1, 2).float() / 255
        assert arrays["image"].dtype == np.uint8 and made.shape == original.x.shape
        assert arrays["label"].tolist() == original.y.tolist() and arrays["index"].tolist() == original.index.tolist()
        assert not {*arrays["index"].tolist()} & {*mini.val.index.tolist()}
        assert np.allclose(arrays["psnr"], psnr(original.x, made), atol=1e-3)
        assert np.allclose(arrays["ssim"], ssim(original.x, made), atol=1e-5)


def test_they_are_recognisable_but_changed(make: Make, whole: Path) -> None:
    for copies in make(whole):
        distorted = copies.attempt < ATTEMPTS
        assert distorted.float().mean() > 0.75 and (copies.ssim[distorted] >= MIN_SSIM).all()
        assert copies.psnr.mean() < copies.plain - 1.5 and copies.psnr.std() > 1
        assert f"{COUNT} images; PSNR" in str(copies)


def test_groups_have_different_distortions_and_images_of_a_group_the_same(
    trained: dict[str, Network], mini: DataSet
) -> None:
    generator = Distorter(trained["edsr"], "edsr", 0)
    x = mini.train.batch(range(1)).x.expand(4, -1, -1, -1)
    made = torch.stack([generator(x, group)[0] for group in range(6)])
    assert all(torch.equal(each[0], each[3]) for each in made)
    assert len(made[:, 0].flatten(1).unique(dim=0)) == 6
    assert not torch.equal(replace(generator, seed=1)(x, 0)[0], made[0])


def test_what_is_no_more_like_itself_is_drawn_again(
    trained: dict[str, Network], mini: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others of its group need; where no distortion will do, the image is only reconstructed."""
    x, generator = mini.train.batch(range(GROUP)).x, Distorter(trained["cae"], "cae", 0)
    monkeypatch.setattr(generate, "MIN_SSIM", 0.5)
    drawn = [generator(x, group) for group in range(6)]
    attempts = torch.cat([attempt for _, attempt in drawn])
    assert {0, 1} <= {*attempts.tolist()}
    assert any(len({*attempt.tolist()}) > 1 for _, attempt in drawn)  # within a group
    for made, attempt in drawn:
        assert (ssim(x, made)[attempt < ATTEMPTS] >= 0.5).all()
    monkeypatch.setattr(generate, "MIN_SSIM", 1.1)
    made, attempt = generator(x, 0)
    assert (attempt == ATTEMPTS).all()
    with torch.no_grad():
        assert torch.equal(made, (255 * trained["cae"](x)).clamp(0, 255).round() / 255)


def test_a_part_of_the_images_gives_the_same_copies(make: Make, whole: Path, tmp_path: Path) -> None:
    make(tmp_path / "part", limit=2 * GROUP)
    for name in NAMES:
        with np.load(whole / name) as all_, np.load(tmp_path / "part" / name) as part:
            assert np.array_equal(all_["image"][: 2 * GROUP], part["image"])


@pytest.mark.parametrize("after", [0, 4, 6, 9])
def test_stopped_anywhere_and_run_again_gives_the_same_files(
    make: Make, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    write, written = storage.write_arrays, [0]

    def stop(path: Path, *rest: Any) -> None:
        if written[0] == after:
            (path.parent / f".{path.name}.tmp").write_bytes(b"half")  # what a kill may leave is no part
            raise KeyboardInterrupt
        written[0] += path.parent.name.endswith(".parts")
        write(path, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "write_arrays", stop)
        make(tmp_path / "parts")
    make(tmp_path / "parts")
    for left in tmp_path.rglob(".*.tmp"):
        left.unlink()
    assert _bytes(tmp_path / "parts") == _bytes(whole)


def test_parts_may_be_made_in_any_order(
    make: Make, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        make(tmp_path / "again")
    for name in NETWORKS:
        (tmp_path / "again" / f"{name}.npz").unlink()
        parts = sorted((tmp_path / "again" / f"{name}.parts").iterdir())
        assert len(parts) == 6
        for part in (parts[0], parts[3], parts[5]):
            part.unlink()
    make(tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(whole)


def test_a_finished_folder_is_left_as_it_is(make: Make, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    first, again = make(whole), make(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before
    assert [str(each) for each in again] == [str(each) for each in first]


def test_recipes_read_them_as_extra(whole: Path, mini: DataSet) -> None:
    extra = [Extra(data={"name": "npz", "path": str(whole / name), "classes": 10}) for name in NAMES]
    assert [len(each.train) for each in build_extra(extra, mini)] == [COUNT, COUNT]


def test_grey_images_are_copied_too(tiny_data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = replace(
        tiny_data,
        shape=(1, 8, 8),
        train=_Grey(tiny_data.train),  # type: ignore[arg-type]
        val=_Grey(tiny_data.val),  # type: ignore[arg-type]
    )
    monkeypatch.setattr(generate, "MIN_PSNR", 0.0)
    made = deepaugment(grey, tmp_path / "made", steps=2)
    data = datasets.build({"name": "npz", "path": str(made[0].path), "classes": 3})
    assert data.shape == (1, 8, 8) and torch.equal(data.train.labels, tiny_data.train.labels)


class _Grey:
    def __init__(self, split: Any) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Any) -> Any:
        batch = self.split.batch(positions)
        return batch._replace(x=batch.x.mean(1, keepdim=True))

    def subset(self, positions: Any) -> Any:
        return _Grey(self.split.subset(positions))


class TestRefused:
    def test_other_settings_in_the_same_folder(self, make: Make, whole: Path, tiny_data: DataSet) -> None:
        for settings, said in (
            ({"seed": 1}, "seed: 0 -> 1"),
            ({"limit": 20}, f"images: {COUNT} -> 20"),
            ({"steps": 7}, "steps: 600 -> 7"),
        ):
            with pytest.raises(BastionError, match=rf"made was made otherwise \({said}\); give another folder"):
                make(whole, **settings)
        with pytest.raises(BastionError, match=r"was made otherwise \(data: .* -> 'tiny-1'"):
            deepaugment(tiny_data, whole, limit=COUNT)

    def test_other_weights_in_the_same_folder(self, make: Make, whole: Path, tmp_path: Path) -> None:
        fit.save(NETWORKS["cae"](3, 8, 1), tmp_path / "other")
        with pytest.raises(BastionError, match="was made with other weights than .*other; give another folder"):
            make(whole, weights={"cae": tmp_path / "other"})
        make(whole, weights=None)  # those that are stored there

    def test_a_folder_of_other_files(self, make: Make, tmp_path: Path) -> None:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "letter.txt").write_text("dear")
        with pytest.raises(BastionError, match="made holds other files; give a new folder"):
            make(tmp_path / "made")

    def test_a_network_that_reconstructs_nothing(self, make: Make, tmp_path: Path) -> None:
        fit.save(NETWORKS["edsr"](3, 8, 1), tmp_path / "untrained")
        with pytest.raises(BastionError, match=r"edsr.safetensors reconstructs cifar10-mini with a PSNR of \d+\.\d dB"):
            make(tmp_path / "made", weights={"edsr": tmp_path / "untrained"})

    def test_weights_that_are_damaged(self, make: Make, weights: dict[str, Path], tmp_path: Path) -> None:
        (tmp_path / "cut").write_bytes(weights["edsr"].read_bytes()[:-9])
        with pytest.raises(BastionError, match="cut: corrupt or truncated"):
            make(tmp_path / "made", weights={"edsr": tmp_path / "cut"})

    def test_a_damaged_part(self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(generate, "_join", _interrupt)
            make(tmp_path / "made")
        part = tmp_path / "made" / "edsr.parts" / f"{GROUP:08d}.safetensors"
        content = bytearray(part.read_bytes())
        content[-3] ^= 1
        part.write_bytes(content)
        with pytest.raises(BastionError, match=f"{part.name}: corrupt: .*; remove it and make it again"):
            make(tmp_path / "made")

    def test_a_damaged_result(self, make: Make, whole: Path, tmp_path: Path) -> None:
        shutil.copytree(whole, tmp_path / "made")
        path = tmp_path / "made" / "edsr.npz"
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(BastionError, match=r"edsr.npz: damaged .*; remove it and run the same command again"):
            make(tmp_path / "made")

    def test_no_training_images(self, mini: DataSet, tmp_path: Path) -> None:
        with pytest.raises(BastionError, match="there are 3600 training images of cifar10-mini, 0 to use"):
            deepaugment(mini, tmp_path / "made", limit=0)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
