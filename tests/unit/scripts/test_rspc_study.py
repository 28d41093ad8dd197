"""The claims of the RSPC study, on numbers for which the answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts.rspc_study import ARMS, CONFIDENCES, LEARNED, SHOWN, STANDARD, Measured, claims, is_trained
from scripts.study import FAILED, HELD, OPEN
from tests.conftest import QUICK

from bastion import storage
from bastion.training.trainer import train

USUAL = {
    **dict.fromkeys(SHOWN, 0.5),
    "occluded, random masks, same images": 0.5,
    "attention similarity, same images": 0.5,
    **{f"drop {name}": 0.0 for name in CONFIDENCES[1:]},
}


def _verdicts(changes: dict[str, dict[str, float]], noise: float = 0.001) -> dict[str, str]:
    """By claim and arm, of three seeds that differ by a little noise; `changes` are added to an arm's numbers."""

    def run(arm: str, seed: int) -> Measured:
        extra = changes.get(arm, {})
        values: dict[str, Any] = {name: usual + extra.get(name, 0) for name, usual in USUAL.items()}
        return Measured({name: value + noise * seed * (name in extra) for name, value in values.items()}, [0.5, 0.5])

    made = claims({arm: [run(arm, seed) for seed in range(3)] for arm in ARMS})
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
    assert _verdicts({STANDARD: drops})[f"R1, {ARMS[STANDARD][0]}"] == verdict


def test_gains_are_against_standard_training_with_the_same_seed() -> None:
    found = _verdicts({LEARNED: {"corruptions": 0.03, "corruptions without noise": -0.03, "clean": -0.001}})
    label = ARMS[LEARNED][0]
    assert (found[f"R3, {label}"], found[f"R4, {label}"]) == (HELD, FAILED)
    assert _verdicts({LEARNED: {"corruptions": 0.03, "clean": -0.02}})[f"R3, {label}"] == FAILED  # too much clean lost
    assert _verdicts({LEARNED: {"corruptions": 0.03}}, noise=0.05)[f"R3, {label}"] == OPEN


def test_masks_are_compared_on_the_same_images() -> None:
    easier = {"occluded, random masks": -0.1}  # on other images
    harder = {"occluded, learned masks": -0.1, "attention similarity, learned masks": -0.1}
    label = f"R5, masks, {ARMS[STANDARD][0]}"
    assert _verdicts({STANDARD: easier | harder})[label] == HELD
    assert _verdicts({STANDARD: {name: -value for name, value in harder.items()}})[label] == FAILED


def test_what_was_not_run_is_open() -> None:
    found = _verdicts({})
    assert {found[f"{claim}, "] for claim in ("R6", "R7", "R8")} == {OPEN}


def test_a_run_is_trained_when_its_model_is_of_the_last_epoch(tmp_path: Path) -> None:
    assert not is_trained(tmp_path / "nothing")
    run = train("base/micro", changes=(*QUICK, "schedule.epochs=2"), folder=tmp_path / "run")
    assert is_trained(run.folder)
    path = run.folder / "model" / "card.json"
    card = storage.read_json(path)
    storage.write_json(path, {**card, "about": {**card["about"], "epoch": 1}})
    assert not is_trained(run.folder)
