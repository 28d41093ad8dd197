"""`bastion.attack` and `bastion.evaluate`: attack a model's tensors, or evaluate it, in one call; nothing is stored.

adv = bastion.attack(model, x, y, "autoattack", norm="linf", eps=8/255)
result = bastion.evaluate(model, (x, y), attacks=["apgd-t", PGD(steps=20)], norm="linf", eps=[2/255, 8/255])
"""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bastion import forward, journal, rng
from bastion.acceleration import BATCH_SIZES, Accelerated, accelerate
from bastion.attacks import Attack, Threat, attacks
from bastion.attacks.judge import Verdict, is_adversarial, judge
from bastion.data.user_data import ClassMap, as_data, images, labels
from bastion.errors import OTHER_NAMES, BastionError, explain_unknown, shown
from bastion.forward import device_of, in_mode, predict
from bastion.measuring.facts import Facts
from bastion.measuring.guards import first_symptoms, warn_if_normalised_input_is_expected, warn_of
from bastion.measuring.plan import BATCH_SIZE, Model, check_integers
from bastion.measuring.runner import measure
from bastion.measuring.sanity import FEWEST, SanityWarning, accuracy_warnings
from bastion.measuring.sanity import warnings as sanity_warnings
from bastion.models.load import as_module
from bastion.probes.adversarial import fooling_members
from bastion.progress import Advance, bar
from bastion.recipe_yaml import read_spec, read_value
from bastion.threat import Norm
from bastion.types import Batch, DataSet

# Passes on an image. Preparing a copy of a model takes some 40 of them, and may save a third of what follows.
WORTH_PREPARING = 200
Attacks = str | Mapping[str, Any] | Attack
Radius = float | str  # 0.03 or "8/255"


@dataclass(frozen=True)
class AdversarialExamples:
    """Result of an attack: one row per image, on the images' device."""

    x: Tensor  # inside the threat's set
    success: Tensor  # bool: misclassified; clean mistakes count, at distance 0
    distance: Tensor  # from the image, in the threat's norm; infinite where the attack failed
    logits: Tensor  # of the model at x
    fooled_by: Tensor  # the number of the ensemble's member that fooled it; -1: none did, or the attack is no ensemble

    def __repr__(self) -> str:
        return f"AdversarialExamples({int(self.success.sum())} of {len(self.success)} misclassified)"


def attack(
    model: Model,
    x: Any = None,
    y: Any = None,
    attack: Attacks = "autoattack",
    *,
    norm: Norm = "linf",
    eps: Radius | None = None,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    **settings: Any,
) -> AdversarialExamples:
    """Attack images with pixels in [0, 1] inside a ball of radius `eps`, under linf 8/255 if none is given.

    The results are checked on the model itself. Symptoms that a failure of the attack says nothing about robustness
    are warned of (docs/sanity.md).

    The model takes pixels and gives logits: a module, which is run in eval mode, a function, or the name of a model.
    Images and labels may also be one argument: `(x, y)`, a torch Dataset or a DataLoader.
    `attack` is a name (see `bastion list attacks`), which `settings` may follow: `"pgd", steps=20`; a dict such as
    `{"name": "pgd", "steps": 20}`, or an attack.
    """
    check_integers({"batch_size": batch_size}, least=1)
    for name in settings:
        if OTHER_NAMES.get(name) in ("x", "y", "eps"):
            raise BastionError(f"attack: unknown argument '{name}'; did you mean '{OTHER_NAMES[name]}'?")
    x, y = (x, y) if y is not None else _pair(x)
    given_on = x.device if isinstance(x, Tensor) else torch.device("cpu")
    network = as_module(model, given_on)
    batch = _batch(x, y, network)
    threat, chosen = Threat(norm, *radii(eps, norm)), _chosen(attack, settings)
    threat.check_bounds(batch.x.shape[1:])
    warn_if_normalised_input_is_expected(network, batch)
    symptoms = first_symptoms(network, batch)
    if chosen.eot > 1:
        del symptoms["warning.stochastic"]  # the attack is for such models
    device, found, verdicts = device_of(network), [], []
    count = len(batch.x)
    accelerated = accelerate(network)
    if 0 < count * chosen.passes(threat.norm) < WORTH_PREPARING:
        accelerated = Accelerated(network, enabled=False, batch_size=BATCH_SIZES[0])
    with (
        in_mode(network, training=False),
        rng.preserved(),
        bar("attacking", 1, unit="share") as advance,
        journal.opened() as notes,
    ):
        for start in range(0, count, batch_size):
            some = batch.select(torch.arange(start, min(start + batch_size, count))).to(device)
            rng.reseed("attack", seed, start)
            with journal.watched(partial(_show_progress, advance, start, len(some.x), count)):
                verdicts.append(judge(accelerated, some, chosen, threat, seed=seed))
            found.append(_examples(accelerated, some, threat, verdicts[-1], notes))
            advance(done=(start + len(some.x)) / count)
    clean, inside, fooled = (
        torch.cat([getattr(each, name) for each in verdicts]) for name in ("clean", "inside", "fooled")
    )
    warn_of(_warnings([symptoms, notes.columns(batch.index, fooled, inside)], clean, batch.y, found[0].logits.shape[1]))
    names = [field.name for field in dataclasses.fields(AdversarialExamples)]
    return AdversarialExamples(*(torch.cat([getattr(each, name) for each in found]).to(given_on) for name in names))


def _chosen(attack: Attacks, settings: dict[str, Any]) -> Attack:
    if not settings:
        return attack if isinstance(attack, Attack) else attacks.build(attack)
    if not isinstance(attack, str):
        raise BastionError(f"attack: {next(iter(settings))}= goes with the name of an attack, such as 'pgd'")
    return attacks.build(read_spec(attack) | settings, "attack")


def _show_progress(advance: Advance, start: int, images: int, count: int, share: float, survivors: int) -> None:
    advance(done=(start + share * images) / count, note=f"{survivors} of {images} survive")


def _examples(
    model: nn.Module, batch: Batch, threat: Threat, verdict: Verdict, notes: journal.Journal
) -> AdversarialExamples:
    # Images outside the threat's set are not adversarial examples: return the clean image instead.
    x = torch.where(verdict.inside.view(-1, 1, 1, 1), verdict.x, batch.x)
    logits = predict(model, batch.at(x))
    success = is_adversarial(threat, batch.x, x, logits, batch.y)
    distance = torch.where(success, threat.distance(batch.x, x), torch.inf)
    return AdversarialExamples(x, success, distance, logits, fooling_members(notes, batch.index, verdict.fooled))


def _warnings(
    symptoms: Sequence[Mapping[str, Tensor]], clean: Tensor, y: Tensor, classes: int
) -> Iterator[SanityWarning]:
    """Warnings of clean accuracy, of the first images, and of what the attack noted."""
    if len(y) >= FEWEST:
        found = accuracy_warnings("attack", clean.cpu().numpy(), y.numpy(), classes)
        yield from (each for each in found if each.code == "at-chance")
    for columns in symptoms:
        yield from sanity_warnings({f"attack/{name}": column.cpu().numpy() for name, column in columns.items()})


def _pair(given: Any) -> tuple[Any, Any]:
    """Return images and labels that were given as one."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return given[0], given[1]
    if isinstance(given, Dataset | DataLoader):
        data = as_data(given)
        assert isinstance(data, DataSet)
        batch = data.test.batch(range(len(data.test)))
        return batch.x, batch.y
    raise BastionError("attack: give images and labels: bastion.attack(model, x, y, …)")


def _batch(x: Any, y: Any, network: nn.Module) -> Batch:
    """Return the examples, in float64 for a network in float64; raise if the network does not run on them."""
    double = {each.dtype for each in network.parameters()} == {torch.float64}
    pictures, classes = images(x, torch.float64 if double else torch.float32), labels(y)
    if len(pictures) != len(classes):
        raise BastionError(f"attack: {len(pictures)} images, but {len(classes)} labels")
    if not len(pictures):
        raise BastionError("attack: there are no images")
    try:
        with torch.no_grad(), in_mode(network, training=False), rng.preserved():
            forward.logits(network, pictures[:2].to(device_of(network)))
    except BastionError:
        raise
    except Exception as error:  # a user's network may raise anything
        shape, reason = ", ".join(map(str, pictures.shape[1:])), f"{type(error).__name__}: {error}"
        raise BastionError(f"attack: the model does not take images (B, {shape}): {reason}") from error
    return Batch(torch.arange(len(pictures)), pictures, classes)


def radius(eps: Any) -> float:
    """Parse eps: 0.03, "8/255", or a number of numpy or torch."""
    value = read_value(eps, "eps") if isinstance(eps, str) else eps
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BastionError(f"eps: expected a number such as 8/255, got {eps!r}")
    return float(value)


def radii(eps: Any, norm: str) -> list[float]:
    """Parse one eps or several: a list, an array or a tensor; None is 8/255 under linf, and an error elsewhere."""
    if eps is None and str(norm).lower() in ("l2", "l1"):
        usual = "0.5" if str(norm).lower() == "l2" else "12"
        raise BastionError(f"eps: give one, such as {usual}; only linf has a default, 8/255, which is tiny in {norm}")
    eps = 8 / 255 if eps is None else eps
    single = isinstance(eps, str) or not isinstance(eps, Iterable) or getattr(eps, "ndim", 1) == 0
    return [radius(each) for each in ([eps] if single else eps)]


def _setting_of_an_attack(name: str, value: object) -> str:
    """Return how to give a setting of an attack; empty if none has it."""
    having = [each for each in ("pgd", *attacks.names()) if name in inspect.signature(attacks.factory(each)).parameters]
    if not having:
        return ""
    return f'{name} is a setting of an attack: attacks=[{{"name": "{having[0]}", "{name}": {shown(value)}}}]'


@explain_unknown(_setting_of_an_attack)
def evaluate(
    model: Model,
    data: Any,
    attacks: Attacks | Sequence[Attacks] = "autoattack",
    *,
    norm: Norm = "linf",
    eps: Radius | Sequence[Radius] | None = None,
    checks: bool = True,
    limit: int | None = None,
    seed: int = 0,
    workers: int | None = 1,
    batch_size: int = BATCH_SIZE,
    keep: int | str = 0,
    device: str | None = None,
    class_map: ClassMap | None = None,
) -> Facts:
    """Measure clean and robust accuracy with 95 % intervals, under each attack, at each radius (under linf 8/255).

    Like `measure` with a suite of these attacks, but nothing is stored and nothing is resumed. `checks` warn of
    numbers not to trust (docs/sanity.md). `keep="all"` keeps the adversarial examples:
    `result.adversarial("pgd")`, `result.export("adv.npz")`. `device` and `class_map` are as of `measure`.
    """
    if isinstance(data, Tensor | np.ndarray):
        raise BastionError("evaluate: give images and labels together: evaluate(model, (x, y), …)")
    suite = attack_suite(attack_list(attacks), norm, radii(eps, norm), checks=checks)
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        options: dict[str, Any] = {"limit": limit, "seed": seed, "workers": workers, "batch_size": batch_size}
        options |= {"keep": keep, "device": device, "class_map": class_map}
        return measure(model, data, suite, folder=Path(folder) / "run", **options).in_memory()


def attack_list(given: Attacks | Sequence[Attacks]) -> list[Attacks]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def attack_suite(
    chosen: Sequence[Attacks], norm: Norm, radii: Sequence[float], *, checks: bool = True
) -> dict[str, Any]:
    """Return a suite as a dict: clean accuracy, each attack at each radius, sanity checks."""
    if not chosen or not radii:
        raise BastionError("evaluate: give at least one attack and one eps")
    names = [_label(each) for each in chosen]
    probes: dict[str, Any] = {"clean": "accuracy"}
    for number, (name, each) in enumerate(zip(names, chosen, strict=True)):
        label = name if names.count(name) == 1 else f"{name} {names[: number + 1].count(name)}"
        probes[label] = {"name": "adversarial", "threat": {"norm": norm}, "attack": each}
    labels, paths = list(probes), [f"probes.{label}.threat.eps" for label in list(probes)[1:]]
    if checks:
        probes["checks"] = {"name": "sanity", "threat": {"norm": norm, "eps": max(radii)}}
    worst = {"worst case": {"worst": labels}} if len(labels) > 2 and len(radii) == 1 else {}
    return {"axes": {"eps": {"set": paths, "to": list(radii)}}, "probes": probes, "aggregates": worst}


def _label(chosen: Attacks) -> str:
    if not isinstance(chosen, str | Mapping | Attack):
        attacks.check(chosen)  # says what is wrong with it
    text = chosen.describe() if isinstance(chosen, Attack) else chosen
    return str(text.get("name") if isinstance(text, Mapping) else text).replace("/", "∕")
