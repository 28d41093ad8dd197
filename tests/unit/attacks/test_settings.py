"""What settings an attack refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest

from bastion import BastionError
from bastion.attacks import attacks

# For each attack, numbers that are just out of bounds.
REFUSED: dict[str, dict[str, Any]] = {
    "pgd": {"steps": -1, "step": 0, "rel_step": 0, "restarts": 0, "targets": -1, "momentum": -0.1, "sparsity": 0},
    "apgd": {"steps": -1, "targets": -1, "restarts": 0, "eot": 0, "sparsity": 1.1},
    "fab": {"steps": -1, "targets": -1, "restarts": 0, "overshoot": 1.0, "backward": 1.0},
    "square": {"queries": -1, "restarts": 0, "share": 0},
    "cw": {"c": 0, "kappa": -1, "lr": 0, "steps": -1},
    "deepfool": {"steps": -1, "overshoot": 0, "classes": 0},
    "minimal": {"fab_steps": -1, "fab_targets": 0, "bisections": -1, "steps": -1, "targets": 0},
    "patch-pgd": {"patches": 0, "size": 0, "steps": -1, "rel_step": 0, "restarts": 0, "sparsity": 0},
    "patch-noise": {"patches": 0, "size": 0, "draws": 0},
    "patch-occlusion": {"share": 0, "size": 0, "draws": 0},
    "patch-gaussian": {"sigma": 0, "share": 0, "size": 0, "draws": 0},
    "patch-fool": {
        "patches": 0,
        "size": 0,
        "block": -1,
        "steps": -1,
        "rel_step": 0,
        "decay": 1.1,
        "decay_every": 0,
        "weight": -1,
        "pixels": 0,
        "pixel_step": 0,
        "pixel_steps": -1,
    },
    "transferable": {
        "steps": -1,
        "rel_step": 0,
        "momentum": -1,
        "sparsity": 0,
        "seen": 0,
        "size": 0,
        "spread": -1,
        "shrink": 0,
        "blur": -1,
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_out_of_bounds_are_refused_with_their_place(name: str) -> None:
    for setting, value in REFUSED[name].items():
        with pytest.raises(BastionError, match=rf"^here\.{setting}: input should be .*, got {value}"):
            attacks.build({"name": name, setting: value}, "here")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "pdg"}, "unknown attack 'pdg'; did you mean 'pgd'"),
        ({"name": "PGD"}, "unknown attack 'PGD'; did you mean 'pgd'"),
        ({"name": "LinfPGD"}, "unknown attack 'LinfPGD'; did you mean 'pgd'"),
        ({"name": "bim"}, "unknown attack 'bim'; did you mean 'pgd'"),
        ({"name": "MIFGSM"}, "unknown attack 'MIFGSM'; did you mean 'mi-fgsm'"),
        ({"name": "pgd", "step_size": 1}, "attack.step_size: unknown key; did you mean 'step'"),
        ({"name": "pgd", "alpha": 1}, "attack.alpha: unknown key; did you mean 'step'"),
        ({"name": "pgd", "eps": 1}, "attack.eps: unknown key; eps belongs to the threat: {norm: linf, eps: 8/255}, or"),
        ({"name": "pgd", "steps": "many"}, "attack.steps: expected a whole number, got 'many'"),
        ({"name": "pgd", "loss": "hinge"}, "attack.loss: unknown loss 'hinge'; known: ce, dlr, kl, margin"),
        ({"name": "pgd", "step": 0.1, "rel_step": 0.1}, "not both"),
        ({"name": "pgd", "keep": "last", "restarts": 5}, "it takes no 5 restarts"),
        ({"name": "pgd", "loss": "kl", "targets": 2}, "the loss kl has no targets"),
        ({"name": "patch-pgd", "choose": "best"}, "attack.choose: unknown choose 'best'; known: attention, gradient"),
        ({"name": "ensemble", "members": []}, "attack.members: .*at least 1 item"),
        ({"name": "ensemble", "members": ["pgd", {"name": "fab", "step": 3}]}, r"attack.members.1.step: unknown key"),
        ({"name": "autoattack", "version": "fast"}, "attack.version: unknown version 'fast'; known: plus, rand"),
    ],
)
def test_bad_settings_are_refused_with_their_path(spec: dict[str, object], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        attacks.build(spec)
