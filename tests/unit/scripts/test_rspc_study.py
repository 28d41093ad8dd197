"""The claims of the RSPC study, on numbers for which the answer is known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from scripts import rspc_study
from scripts.rspc_study import (
    ARMS,
    COMPARED,
    CONFIDENCES,
    LEARNED,
    NOT_RUN,
    RECIPE,
    RVT_RSPC,
    SHOWN,
    STANDARD,
    STRONG,
    TRADES,
    Measured,
    changes,
    claims,
    is_measured,
    is_trained,
    made,
    result,
)
from scripts.study import FAILED, HELD, OPEN
from tests.conftest import QUICK

from bastion import storage
from bastion.recipe import load_recipe
from bastion.run import Run
from bastion.training.distributed import Processes
from bastion.training.trainer import Trainer, train

USUAL = {
    **dict.fromkeys(SHOWN, 0.5),
    "occluded, random masks, same images": 0.5,
    "attention similarity, same images": 0.5,
    **{f"drop {name}": 0.0 for name in CONFIDENCES[1:]},
}


def _verdicts(
    changes: dict[str, dict[str, float]], noise: float = 0.001, arms: Iterable[str] = COMPARED
) -> dict[str, str]:
    """By claim and arm, of three seeds that differ by a little noise; `changes` are added to an arm's numbers."""

    def run(arm: str, seed: int) -> Measured:
        extra = changes.get(arm, {})
        values: dict[str, Any] = {name: usual + extra.get(name, 0) for name, usual in USUAL.items()}
        return Measured({name: value + noise * seed * (name in extra) for name, value in values.items()}, [0.5, 0.5])

    made = claims({arm: [run(arm, seed) for seed in range(3)] for arm in arms})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines()[2:]]
    return {f"{row[0].partition(':')[0]}, {row[1]}": row[-1] for row in rows}


@pytest.mark.parametrize(
    ("adversarial", "occluded", "noisy", "verdict"),
    [
        (0.4, 0.3, 0.02, HELD),  # as the paper has it
        (0.4, 0.02, 0.0, FAILED),  # noise does nothing, but occlusion does next to nothing either
        (0.4, 0.3, 0.28, FAILED),
    ],
)
def test_occlusion_must_be_near_to_adversarial_patches(
    adversarial: float, occluded: float, noisy: float, verdict: str
) -> None:
    drops = {"drop adversarial": adversarial, "drop occluded": occluded, "drop noisy": noisy}
    assert _verdicts({STANDARD: drops})[f"R1, {ARMS[STANDARD].label}"] == verdict


def test_gains_are_against_standard_training_with_the_same_seed() -> None:
    found = _verdicts({LEARNED: {"corruptions": 0.03, "corruptions without noise": -0.03, "clean": -0.001}})
    label = ARMS[LEARNED].label
    assert (found[f"R3, {label}"], found[f"R4, {label}"]) == (HELD, FAILED)
    assert _verdicts({LEARNED: {"corruptions": 0.03, "clean": -0.02}})[f"R3, {label}"] == FAILED  # too much clean lost
    assert _verdicts({LEARNED: {"corruptions": 0.03}}, noise=0.05)[f"R3, {label}"] == OPEN


def test_masks_are_compared_on_the_same_images() -> None:
    easier = {"occluded, random masks": -0.1}  # on other images
    harder = {"occluded, learned masks": -0.1, "attention similarity, learned masks": -0.1}
    label = f"R5, masks, {ARMS[STANDARD].label}"
    assert _verdicts({STANDARD: easier | harder})[label] == HELD
    assert _verdicts({STANDARD: {name: -value for name, value in harder.items()}})[label] == FAILED


def test_claims_about_arms_that_were_not_run_say_so() -> None:
    found = _verdicts({})
    assert {found[f"{claim}, corruptions"] for claim in ("R6", "R7", "R8")} == {NOT_RUN}


def test_claims_about_further_arms_compare_accuracies_under_corruptions() -> None:
    gains: dict[str, dict[str, float]] = {STRONG: {"corruptions": 0.05}, RVT_RSPC: {"corruptions": -0.05}}
    found = _verdicts(gains, arms=ARMS)
    assert (found["R6, corruptions"], found["R7, corruptions"]) == (HELD, HELD)
    assert found["R8, corruptions"] == FAILED
    assert _verdicts({TRADES[1]: {"corruptions": 0.1}, **gains}, arms=ARMS)["R7, corruptions"] == FAILED


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_can_be_set_up(arm: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, (*changes(arm, 0), "data=cifar10-mini", "train_limit=256"))
    Trainer(recipe, Run(tmp_path), Processes())


def test_a_result_of_other_settings_is_not_taken_for_one_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.rspc_study.RESULTS", tmp_path)
    assert not is_measured(STRONG, 0)
    storage.write_json(result(STRONG, 0), {"values": {}, "by_mask": [], "made": made(STRONG, 0)})
    assert is_measured(STRONG, 0)
    monkeypatch.setitem(rspc_study.IMAGES, "study", 999)
    assert not is_measured(STRONG, 0)
    with pytest.raises(SystemExit, match="rspc-strong-0.json: of another recipe, suite or number of images"):
        rspc_study.write_page()


def test_the_page_is_that_of_the_stored_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = rspc_study.PAGE.read_text()
    monkeypatch.setattr("scripts.rspc_study.PAGE", tmp_path / "rspc.md")
    monkeypatch.setattr("scripts.rspc_study.PICTURE", tmp_path / "rspc.png")
    rspc_study.write_page()
    assert rspc_study.PAGE.read_text() == written


def test_the_default_arms_take_at_most_90_minutes() -> None:
    assert rspc_study.minutes(rspc_study.DEFAULT) <= 90


def test_a_run_is_trained_when_its_model_is_of_the_last_epoch(tmp_path: Path) -> None:
    assert not is_trained(tmp_path / "nothing")
    run = train("base/micro", changes=(*QUICK, "schedule.epochs=2"), folder=tmp_path / "run")
    assert is_trained(run.folder)
    path = run.folder / "model" / "card.json"
    card = storage.read_json(path)
    storage.write_json(path, {**card, "about": {**card["about"], "epoch": 1}})
    assert not is_trained(run.folder)
