from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_samples import random_data_set
from PIL import Image

from bastion.data import datasets
from bastion.data.published_corruptions import with_published_test
from bastion.errors import BastionError
from bastion.suite import load_suite

# Mean errors of AlexNet over five severities (Hendrycks and Dietterich 2019, and their code), and its clean error.
ALEXNET = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
CLEAN = 0.4345


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """fog.npy and labels.npy for the 20 test images of `random_data_set`: every pixel says its row."""
    clean = random_data_set()
    rows = np.arange(100, dtype=np.uint8)
    np.save(tmp_path / "fog.npy", np.broadcast_to(rows[:, None, None, None], (100, 32, 32, 3)))
    np.save(tmp_path / "labels.npy", np.tile(clean.test.labels.numpy().astype(np.uint8), 5))
    return tmp_path


def test_a_severity_is_a_fifth_of_the_rows_in_the_order_of_the_clean_images(arrays: Path) -> None:
    clean = random_data_set()
    data = with_published_test(clean, arrays, "fog", 3)
    assert len(data.test) == 20
    assert (data.test.batch([0, 19]).x[:, 0, 0, 0] * 255).round().tolist() == [40, 59]
    assert torch.equal(data.test.labels, clean.test.labels) and torch.equal(data.test.index, clean.test.index)
    other = with_published_test(clean, arrays, "fog", 4)
    assert (data.name, other.name) == ("noise-c:corruption=fog,severity=3", "noise-c:corruption=fog,severity=4")
    assert data.fingerprint != other.fingerprint and data.test.digest() != other.test.digest()


def test_without_a_corruption_it_is_the_clean_test_set(arrays: Path) -> None:
    clean = random_data_set()
    data = with_published_test(clean, arrays, None, None)
    assert data.name == "noise-c" and data.test.digest() == clean.test.digest()


def test_damaged_and_foreign_arrays_are_refused(arrays: Path) -> None:
    clean = random_data_set()
    with pytest.raises(BastionError, match=r"snow\.npy: no such file"):
        with_published_test(clean, arrays, "snow", 1)
    np.save(arrays / "snow.npy", np.zeros((90, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(BastionError, match=r"snow\.npy: expected uint8 of shape \(100, 32, 32, 3\).*\(90, 32, 32, 3\)"):
        with_published_test(clean, arrays, "snow", 1)
    content = (arrays / "fog.npy").read_bytes()
    (arrays / "fog.npy").write_bytes(content[: len(content) // 2])
    with pytest.raises(BastionError, match=r"fog\.npy: not a \.npy file of plain numbers, or cut off"):
        with_published_test(clean, arrays, "fog", 1)
    (arrays / "fog.npy").write_bytes(content)
    np.save(arrays / "labels.npy", np.zeros(100, dtype=np.uint8))
    with pytest.raises(BastionError, match="not the labels of noise's test images"):
        with_published_test(clean, arrays, "fog", 1)
    with pytest.raises(ValueError, match="'frost_proc' was not published"):
        with_published_test(clean, arrays, "frost_proc", 1)


@pytest.mark.parametrize(
    "shape", ["(10**400,)", "(-1,)", "(2**62, 2**62)", "((1,),)", "(1e9,)", "('a',)", "[3]", "1", "(" * 300, "(True,)"]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about overflow
def test_an_array_of_absurd_shape_is_refused(arrays: Path, shape: str) -> None:
    shape = shape.replace("10**400", "9" * 400).replace("2**62", str(2**62))
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    (arrays / "fog.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(9))
    with pytest.raises(BastionError, match=r"fog\.npy: (not a \.npy file of plain numbers|expected uint8 of shape)"):
        with_published_test(random_data_set(), arrays, "fog", 1)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """val/CLASS/*.JPEG of 256 x 300, and c/weather/fog/2/CLASS/*.JPEG of 224 x 224 with the same names."""
    for label, name in enumerate(("n01", "n02")):
        for number in range(4):
            file = f"{name}/ILSVRC2012_val_{number}.JPEG"
            for folder, size in (("val", (300, 256)), ("c/weather/fog/2", (224, 224))):
                path = tmp_path / folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", size, (40 * number, 100 * label, 7)).save(path, quality=100)
    return tmp_path


def test_imagenet_c_pairs_with_the_clean_pictures(folders: Path) -> None:
    spec = {"name": "imagenet-c", "root": str(folders / "c"), "clean": str(folders / "val")}
    clean, foggy = datasets.build(spec), datasets.build({**spec, "corruption": "fog", "severity": 2})
    assert torch.equal(clean.test.labels, foggy.test.labels) and len(clean.train) == 0
    positions = range(8)
    assert (clean.test.batch(positions).x - foggy.test.batch(positions).x).abs().max() < 3 / 255
    stored = np.array(foggy.test.image(3))
    assert torch.equal(foggy.test.batch([3]).x[0], torch.from_numpy(stored).permute(2, 0, 1).float() / 255)
    assert clean.fingerprint != foggy.fingerprint
    assert (clean.name, foggy.name) == ("imagenet-c", "imagenet-c:corruption=fog,severity=2")


def test_imagenet_c_says_what_is_missing(folders: Path) -> None:
    spec = {"name": "imagenet-c", "root": str(folders / "c")}
    with pytest.raises(BastionError, match=r"data\.clean"):
        datasets.build(spec)
    with pytest.raises(BastionError, match=r"snow: no such folder"):
        datasets.build({**spec, "corruption": "snow", "severity": 1})
    with pytest.raises(BastionError, match="go together"):
        datasets.build({**spec, "corruption": "fog"})
    (folders / "val" / "n01" / "ILSVRC2012_val_0.JPEG").unlink()
    with pytest.raises(BastionError, match=r"same pictures.*n01/ILSVRC2012_val_0\.JPEG \(1 in all\)"):
        datasets.build({**spec, "corruption": "fog", "severity": 2, "clean": str(folders / "val")})


def test_mce_weighs_errors_by_those_of_alexnet() -> None:
    """A network with AlexNet's errors has mCE 100 %, and so on for the other two."""
    suite = load_suite("imagenet-c")
    for name, types, relative in (
        ("mCE", list(ALEXNET), False),
        ("relative mCE", list(ALEXNET), True),
        ("mCE without noise", list(ALEXNET)[3:], False),
    ):
        weights = suite.members(name)
        assert len(weights) == 5 * len(types) + relative
        for kind in types:
            wanted = 1 / (5 * len(types) * (ALEXNET[kind] - CLEAN * relative))
            for severity in range(1, 6):
                assert weights[f"corrupted type={kind} severity={severity}"] == pytest.approx(wanted, rel=1e-6)
        errors = {label: CLEAN if label == "clean" else ALEXNET[label.split("=")[1].split()[0]] for label in weights}
        assert sum(weights[label] * errors[label] for label in weights) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["corruptions", "cifar10-c"])
def test_means_are_of_all_types_and_severities(name: str) -> None:
    suite = load_suite(name)
    assert len(suite.members("mean corruption accuracy")) == 75
    without = suite.members("without noise")
    assert len(without) == 60 and not any("_noise" in label for label in without)
    assert ("frost_proc" in str(suite.axes["type"].to)) == (name == "corruptions")
    for kind in suite.axes["type"].to:
        assert sorted(suite.members(kind)) == [f"corrupted type={kind} severity={s}" for s in range(1, 6)]
