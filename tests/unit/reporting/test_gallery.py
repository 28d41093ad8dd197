from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_runs import CLASSES, EPS, MakeRun
from PIL import Image

from bastion.errors import BastionError
from bastion.measuring.facts import Columns, Facts
from bastion.measuring.measurement import MeasuredThreat
from bastion.measuring.runner import measure
from bastion.measuring.store import Column
from bastion.models import Classifier
from bastion.reporting.gallery import choose, galleries
from bastion.reporting.pictures import data_uri, rescaled, to_bytes
from bastion.reporting.tables import read_runs
from bastion.types import DataSet


def decoded(source: str) -> Column:
    """(C, H, W) bytes of a data URI."""
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def test_a_perturbation_is_shown_as_delta_plus_eps_over_two_eps() -> None:
    delta = np.array([-EPS, -EPS / 2, 0, EPS / 2, EPS], dtype=np.float32)
    assert rescaled(delta, EPS).tolist() == [0, 64, 128, 191, 255]  # 255/4 = 63.75, 255/2 = 127.5


def test_no_perturbation_is_grey_whatever_the_scale() -> None:
    assert (rescaled(np.zeros((1, 2, 2), np.float32), 0) == 128).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_keeps_every_pixel(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    assert (decoded(data_uri(to_bytes(pixels / np.float32(255)))) == pixels).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_large_picture_loses_little_but_bytes(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (channels, 224, 224), dtype=np.uint8)
    source = data_uri(pixels)
    kind, _, content = source.partition(",")
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))).convert("L")).astype(float)
    grey = Image.fromarray(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)).convert("L")
    assert kind == "data:image/webp;base64"
    assert len(source) < 100_000
    assert np.corrcoef(shown.ravel(), np.asarray(grey).ravel())[0, 1] > 0.98


def test_pictures_with_other_channels_are_refused() -> None:
    with pytest.raises(BastionError, match="has 4 channels; 1 or 3"):
        data_uri(np.zeros((4, 2, 2), np.uint8))


def test_examples_that_were_right_come_first() -> None:
    assert choose(np.array([False, True, False, True])).tolist() == [1, 3, 0, 2]
    assert choose(np.ones(20, dtype=bool)).tolist() == list(range(8))
    assert choose(np.array([1, 0, 2, 2, 1])).tolist() == [2, 3, 0, 4, 1]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gallery_shows_the_stored_pictures_and_predictions(make_run: MakeRun, channels: int) -> None:
    (run,) = read_runs([make_run("robust", clean=0.47, robust=0.265, channels=channels).folder])
    facts = run.measurements[0]
    ((_, (gallery,)),) = galleries([run])
    stored = facts.pictures("pgd-20")
    rows = np.flatnonzero(facts.columns["clean/correct"][:16])[:8]
    assert (gallery.label, gallery.threat, gallery.scale) == ("pgd-20", "ℓ∞ ≤ 8/255", "ε = 8/255")
    for row, example in zip(rows, gallery.examples, strict=False):
        delta = stored["adversarial"][row].astype(np.float64) - stored["clean"][row]
        assert (decoded(example.clean.source) == np.rint(255 * stored["clean"][row])).all()
        assert (decoded(example.adversarial.source) == np.rint(255 * stored["adversarial"][row])).all()
        expected = 255 * (delta + EPS) / (2 * EPS)
        assert np.abs(decoded(example.perturbation) - expected).max() <= 0.5 + 1e-3
        assert example.truth == example.clean.caption == CLASSES[facts.columns["pgd-20/label"][row]]
        assert example.adversarial.caption == CLASSES[facts.columns["pgd-20/prediction"][row]]
        survived = facts.columns["pgd-20/correct"][row]
        assert (example.clean.verdict, example.adversarial.verdict) == ("right", "right" if survived else "wrong")


def test_a_clean_mistake_says_what_the_image_is(make_run: MakeRun) -> None:
    (run,) = read_runs([make_run("poor", clean=0, robust=0).folder])
    example = galleries([run])[0][1][0].examples[0]
    assert example.clean.caption.endswith(f"(is {example.truth})")
    assert example.clean.verdict == "wrong"
    assert (decoded(example.perturbation) == 128).all()


@pytest.mark.parametrize("change", [{"norm": "l2"}, {"norm": None}], ids=["l2", "unknown threat"])
def test_without_a_bound_per_pixel_the_largest_change_is_the_scale(
    make_run: MakeRun, change: dict[str, object]
) -> None:
    (run,) = read_runs([make_run("robust", clean=1, robust=0, **change).folder])
    ((_, (gallery,)),) = galleries([run])
    assert gallery.scale == "ε = 0.0314, the largest change of a pixel in these examples"
    levels = np.stack([decoded(example.perturbation) for example in gallery.examples])
    assert (levels.min(), levels.max()) == (0, 255)


def test_a_mistake_outside_the_budget_is_said_not_to_count(make_run: MakeRun) -> None:
    (run,) = read_runs([make_run("cheated", clean=1, robust=0).folder])
    columns = run.measurements[0].columns
    columns["pgd-20/in_budget"][:], columns["pgd-20/correct"][:] = False, True
    assert all(
        example.adversarial.caption.endswith("(outside the budget: does not count)")
        for example in galleries([run])[0][1][0].examples
    )


def test_measurements_that_share_a_probe_share_its_gallery(make_run: MakeRun) -> None:
    (run,) = read_runs([make_run("robust", clean=0.5, robust=0.2).folder])
    run.measurements.append(run.measurements[0])
    assert len(galleries([run])[0][1]) == 1


def test_of_an_attacks_radii_the_largest_has_the_gallery(make_run: MakeRun) -> None:
    (run,) = read_runs([make_run("robust", clean=1, robust=0).folder])
    (facts,) = run.measurements
    attack = facts.case("pgd-20")
    variants = [
        attack.model_copy(
            update={
                "label": f"pgd eps={level}/255",
                "at": {"eps": level / 255},
                "threat": MeasuredThreat(norm="linf", eps=level / 255),
            }
        )
        for level in (2, 8, 4)
    ]
    about = facts.about.model_copy(update={"cases": tuple(variants), "aggregates": {}})
    curve = replace(run, measurements=[Facts(run.files, about, Columns(run.files, about))])
    assert [gallery.label for gallery in galleries([curve])[0][1]] == ["pgd eps=8/255"]


def test_all_models_are_shown_on_the_same_images(make_run: MakeRun) -> None:
    runs = read_runs(make_run(name, clean=clean, robust=0).folder for name, clean in {"a": 0.5, "b": 0.9}.items())
    (_, (one,)), (_, (other,)) = galleries(runs)
    assert [each.clean.source for each in one.examples] == [each.clean.source for each in other.examples]
    right = [[each.clean.verdict == "right" for each in gallery.examples] for gallery in (one, other)]
    assert sorted(right[0], reverse=True) == right[0]  # what a gets right b does too, and so comes first


def test_pictures_of_a_measurement_that_stopped_early_stand_beside_their_own_facts(
    tiny_data: DataSet, tiny_model: Classifier, tmp_path: Path
) -> None:
    """Its positions in the split are scattered, and larger than the number of rows."""
    attack = {"name": "adversarial", "threat": {"norm": "linf", "eps": 0.01}, "attack": {"name": "pgd", "steps": 1}}
    facts = measure(
        tiny_model, tiny_data, {"probes": {"pgd": attack}}, folder=tmp_path, batch_size=4, until=0.7, keep=4
    )
    assert facts.about.population == 40 and max(facts.pictures("pgd")["position"]) >= facts.n
    ((_, (gallery,)),) = galleries(read_runs([tmp_path]))
    shown = {decoded(example.clean.source).tobytes(): example.truth for example in gallery.examples}
    for position in facts.pictures("pgd")["position"]:
        image, label = tiny_data.test.batch([position]).x[0], int(tiny_data.test.labels[position])
        assert shown[np.rint(255 * image.numpy()).astype(np.uint8).tobytes()] == tiny_data.classes[label]
