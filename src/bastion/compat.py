"""Drop-in replacements for AutoAttack and for RobustBench's `benchmark`: a script changes one import line.

from bastion.compat import AutoAttack     # was: from autoattack import AutoAttack
from bastion.compat import benchmark      # was: from robustbench.eval import benchmark
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bastion.attacks import Attack
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import Ensemble
from bastion.attacks.fab import FAB
from bastion.attacks.square import Square
from bastion.errors import BastionError, did_you_mean
from bastion.forward import Function, device_of, in_mode
from bastion.measuring.evaluate import attack, evaluate, radius
from bastion.measuring.guards import warn_of
from bastion.measuring.runner import measure
from bastion.reporting.leaderboard_files import percent, write_model_info
from bastion.suite import written
from bastion.threat import Norm

Value = TypeVar("Value")
AUTOATTACK_NORMS: dict[str, Norm] = {"Linf": "linf", "L2": "l2", "L1": "l1"}
VERSIONS = {
    "standard": ["apgd-ce", "apgd-t", "fab-t", "square"],
    "plus": ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"],
    "rand": ["apgd-ce", "apgd-dlr"],
    "custom": [],
}

IMAGENET_PICTURES = 5000
PREPROCESSING = {"Res256Crop224": "bilinear", "BicubicRes256Crop224": "bicubic"}  # RobustBench's names


@dataclass(slots=True)  # so that setting an unknown attribute is an error
class ApgdSettings:
    n_restarts: int = 5
    n_iter: int = 100
    eot_iter: int = 1
    use_largereps: bool = False  # l1: first in a ball of three times the radius


@dataclass(slots=True)
class ApgdTargetedSettings:
    n_restarts: int = 1
    n_iter: int = 100
    eot_iter: int = 1
    n_target_classes: int = 9
    use_largereps: bool = False


@dataclass(slots=True)
class FabSettings:
    n_restarts: int = 5  # of `fab`; `fab-t` has one, as in AutoAttack
    n_iter: int = 100
    n_target_classes: int = 9


@dataclass(slots=True)
class SquareSettings:
    n_queries: int = 5000
    n_restarts: int = 1
    p_init: float = 0.8


class AutoAttack:
    """AutoAttack (Croce and Hein 2020) with the official class's arguments, attributes and return values.

    `model` takes images (N, C, H, W) in [0, 1] to logits: a module, which is run in eval mode, or any function. Images
    go where the module is; a function gets them on `device`. Without a seed it is 0, so results repeat. Afterwards
    `attacks_to_run`, `apgd.n_restarts`, `fab.n_restarts`, `square.n_queries` and so on can be set as in the original.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Tensor], Tensor],
        norm: str = "Linf",
        eps: float = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        is_tf_model: bool = False,
        device: Any = None,
        log_path: str | Path | None = None,
    ) -> None:
        if is_tf_model:
            raise BastionError("AutoAttack: TensorFlow models are not supported; give a function of torch tensors")
        if attacks_to_run and version != "custom":
            raise BastionError("AutoAttack: attacks_to_run is for version='custom'; the other versions have their own")
        self.model = model if isinstance(model, nn.Module) else Function(model, device)
        self.norm, self.epsilon, self.seed, self.verbose, self.version = norm, eps, seed, verbose, version
        self._norm = _lookup(norm, AUTOATTACK_NORMS, "norm")
        self.attacks_to_run = [*(_lookup(version, VERSIONS, "version") or attacks_to_run)]
        self.log_path = Path(log_path) if log_path else None
        self.apgd, self.apgd_targeted = ApgdSettings(), ApgdTargetedSettings()
        self.fab, self.square = FabSettings(), SquareSettings()
        self._set_version()

    def _set_version(self) -> None:
        """Apply the official settings of the version; `custom` keeps the defaults."""
        if self.version == "standard":
            self.apgd.n_restarts = self.fab.n_restarts = 1
            if self._norm == "l1":
                self.apgd.n_restarts, self.apgd_targeted.n_target_classes = 5, 5
                self.apgd.use_largereps = self.apgd_targeted.use_largereps = True
        elif self.version == "rand":
            self.apgd.n_restarts, self.apgd.eot_iter = 1, 20

    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int = 250,
        return_labels: bool = False,
        state_path: str | Path | None = None,
    ) -> Any:
        """Return the images, with adversarial examples where an attack succeeded; each attack runs on the survivors.

        With `return_labels` also return the predicted labels. The original's warnings come as Python's, and more
        (docs/sanity.md).
        """
        if state_path is not None:
            raise BastionError(
                "AutoAttack: state_path is not supported; `bastion.measure` stores and resumes by itself"
            )
        began, names = time.perf_counter(), self.attacks_to_run
        members = tuple(self._member(name) for name in names)
        if not members:
            raise BastionError("AutoAttack: attacks_to_run is empty; give some of " + ", ".join(VERSIONS["plus"]))
        options: dict[str, Any] = {"norm": self._norm, "eps": self.epsilon, "batch_size": bs}
        found = attack(self.model, x_orig, y_orig, Ensemble(members=members), seed=self.seed or 0, **options)
        x_adv = torch.where(found.success.view(-1, 1, 1, 1), found.x.to(x_orig), x_orig)
        y_adv = torch.where(found.success.to(y_orig.device), found.logits.argmax(1).to(y_orig), y_orig)
        fooled_by = [names[number] for number in found.fooled_by.tolist() if number >= 0]
        self._log_accuracies(fooled_by, int((~found.success).sum()), len(x_orig), time.perf_counter() - began)
        self._log(f"max {self.norm} perturbation: {torch.where(found.success, found.distance, 0).max():.5f}")
        return (x_adv, y_adv) if return_labels else x_adv

    def run_standard_evaluation_individual(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False
    ) -> dict[str, Any]:
        """Run each attack on all images; return the results by its name."""
        chosen, found = self.attacks_to_run, {}
        try:
            for name in chosen:
                self.attacks_to_run = [name]
                found[name] = self.run_standard_evaluation(x_orig, y_orig, bs, return_labels)
        finally:
            self.attacks_to_run = chosen
        return found

    def clean_accuracy(self, x_orig: Tensor, y_orig: Tensor, bs: int = 250) -> float:
        """Return the share of images that are classified correctly."""
        device, right = device_of(self.model), 0
        with torch.no_grad(), in_mode(self.model, training=False):
            for at in range(0, len(x_orig), bs):
                logits = self.model(x_orig[at : at + bs].to(device))
                right += int((logits.argmax(1).cpu() == y_orig[at : at + bs].cpu()).sum())
        self._log(f"clean accuracy: {right / len(x_orig):.2%}")
        return right / len(x_orig)

    def _log_accuracies(self, fooled_by: Sequence[str], robust: int, n: int, seconds: float) -> None:
        """Log the accuracy after each attack; `fooled_by`: the attack's name for each image that was fooled."""
        left = robust + len(fooled_by)
        self._log(f"initial accuracy: {left / n:.2%}")
        for name in self.attacks_to_run:
            left -= fooled_by.count(name)
            self._log(f"robust accuracy after {name.upper()}: {left / n:.2%}")
        self._log(f"robust accuracy: {robust / n:.2%} (total time {seconds:.1f} s)")

    def _log(self, line: str) -> None:
        if self.verbose:
            print(line)
        if self.log_path:
            with self.log_path.open("a") as file:
                file.write(line + "\n")

    def _member(self, name: str) -> Attack:
        apgd, targeted, fab, square = self.apgd, self.apgd_targeted, self.fab, self.square
        untargeted: dict[str, Any] = {"steps": apgd.n_iter, "restarts": apgd.n_restarts, "eot": apgd.eot_iter}
        makers: dict[str, Callable[[], Attack]] = {
            "apgd-ce": lambda: APGD(**untargeted, phases=apgd.use_largereps),
            "apgd-dlr": lambda: APGD(**untargeted, phases=apgd.use_largereps, loss="dlr"),
            "apgd-t": lambda: APGD(
                steps=targeted.n_iter,
                restarts=targeted.n_restarts,
                eot=targeted.eot_iter,
                phases=targeted.use_largereps,
                loss="dlr",
                targets=targeted.n_target_classes,
            ),
            "fab": lambda: FAB(steps=fab.n_iter, restarts=fab.n_restarts),
            "fab-t": lambda: FAB(steps=fab.n_iter, targets=fab.n_target_classes),
            "square": lambda: Square(queries=square.n_queries, restarts=square.n_restarts, share=square.p_init),
        }
        return _lookup(name, makers, "attack")()


def benchmark(
    model: nn.Module,
    n_examples: int = 10_000,
    dataset: str = "cifar10",
    threat_model: str = "Linf",
    to_disk: bool = False,
    model_name: str | None = None,
    data_dir: str | Path | None = None,
    corruptions_data_dir: str | Path | None = None,
    device: Any = None,
    batch_size: int = 250,
    eps: float | str | None = None,
    log_path: str | Path | None = None,
    preprocessing: str | None = None,
    aa_state_path: str | Path | None = None,
    *,
    seed: int = 0,
    workers: int | None = 1,
) -> tuple[float, float]:
    """Return clean and robust accuracy as defined by RobustBench (Croce et al. 2021), on the first `n_examples` images.

    `model` takes pixels in [0, 1] to logits. `threat_model` is Linf or L2 with `eps`, AutoAttack's standard version, or
    corruptions, the mean over the 15 types and 5 severities of CIFAR-10-C, whose files are in `corruptions_data_dir`.
    `dataset` is cifar10, cifar100, or imagenet: RobustBench's 5,000 pictures of the validation set in `data_dir`, with
    `preprocessing` Res256Crop224 or BicubicRes256Crop224. CIFAR is looked for in `$BASTION_DATA`, not in `data_dir`.
    `to_disk` writes `model_info/DATASET/THREAT/MODEL_NAME.json`, `log_path` gets the table with intervals. The sanity
    checks run along; what they find is a Python warning, and `unreliable` in the file.
    """
    data, threat = (str(getattr(each, "value", each)) for each in (dataset, threat_model))  # RobustBench's enums too
    if not isinstance(model, nn.Module) or isinstance(device, list | tuple):
        raise BastionError("benchmark: one model on one device at a time; call it once for each")
    if aa_state_path is not None:
        raise BastionError("benchmark: aa_state_path is not supported; `bastion.measure` stores and resumes by itself")
    if to_disk and model_name is None:
        raise BastionError("benchmark: to_disk needs model_name, which names the file")
    if data == "imagenet":
        n_examples = min(n_examples, IMAGENET_PICTURES)
    model = model if device is None else model.to(device)
    options: dict[str, Any] = {"limit": n_examples, "batch_size": batch_size, "seed": seed, "workers": workers}
    if threat == "corruptions":
        corrupted = _lookup(data, {"cifar10": "cifar10-c", "cifar100": "cifar100-c"}, "dataset with corruptions")
        source = {"name": corrupted} | ({"root": str(corruptions_data_dir)} if corruptions_data_dir else {})
        with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
            facts = measure(model, source, "cifar10-c", folder=Path(folder) / "run", keep=0, **options).in_memory()
        robust = facts.aggregate("mean corruption accuracy").value
    else:
        norm = _lookup(threat, {name: AUTOATTACK_NORMS[name] for name in ("Linf", "L2")}, "threat_model")
        if eps is None:
            raise BastionError(f"benchmark: give eps for {threat}, such as eps=8/255")
        source = _clean_data(data, data_dir, preprocessing)
        facts = evaluate(model, source, norm=norm, eps=eps, **options)
        robust = facts.accuracies()["autoattack"].value
    clean, doubts = facts.accuracies()["clean"].value, facts.warnings()
    warn_of(doubts)
    if log_path:
        with Path(log_path).open("a") as file:
            file.write(facts.table() + "\n")
    if to_disk and model_name:
        radii = {"eps": written(radius(eps))} if eps is not None else {}
        field = "corruptions_acc" if threat == "corruptions" else "autoattack_acc"
        known: dict[str, Any] = {"dataset": data, **radii, "clean_acc": percent(clean), field: percent(robust)}
        known |= {"footnote": f"Measured on {facts.n} images.", "unreliable": bool(doubts), "n": facts.n}
        write_model_info(Path("model_info"), data, threat, model_name, known)
    return clean, robust


def _clean_data(dataset: str, folder: str | Path | None, preprocessing: str | None) -> dict[str, Any]:
    if dataset == "imagenet":
        resized = _lookup(preprocessing or "Res256Crop224", PREPROCESSING, "preprocessing")
        root = {} if folder is None else {"root": str(folder)}
        return {"name": "imagenet-val", "subset": "robustbench", "interpolation": resized} | root
    name = _lookup(dataset, {"cifar10": "cifar10", "cifar100": "cifar100"}, "dataset")
    if preprocessing is not None:
        raise BastionError(f"benchmark: preprocessing is for imagenet; {dataset} is measured as it is")
    return {"name": name}


def _lookup(name: str, known: Mapping[str, Value], what: str) -> Value:
    if name not in known:
        raise BastionError(f"unknown {what} '{name}'{did_you_mean(name, known)}")
    return known[name]
