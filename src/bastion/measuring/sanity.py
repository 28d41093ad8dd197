"""Warnings, from facts, that a robustness number should not be trusted. No torch.

Any probe may return bool columns named `warning.CODE`, true for the examples that show the symptom; a study has one
value for each of its parts. CHECKS explains the codes; a plug-in's code without an entry is shown by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bastion.measuring.intervals import wilson
from bastion.measuring.store import WARNING

COLUMN = f"/{WARNING}"  # between the probe's label and the code in the name of a column


@dataclass(frozen=True)
class Check:
    meaning: str  # and what to do about it
    share: float = 0.0  # of the examples, above which it warns
    of_right: bool = False  # the share is of those that are classified right, as no others can show the symptom


_BORDER = 0.002  # as in AutoAttack: at the border of the ball any attack may miss a few
_MASKED = "the gradients are masked, so the failure of gradient attacks says nothing about robustness"

CHECKS: dict[str, Check] = {
    "input-range": Check(
        "No pixel is brighter than 1.5/255: the images seem to be divided by 255 twice. Divide once.",
        share=0.5,  # a single picture may be that dark
    ),
    "nan": Check(
        "The logits of the clean image are NaN or infinite: NaN counts as a mistake, and infinity stops every attack. "
        "Look for overflow and for a division by zero."
    ),
    "probabilities": Check(
        "The model returns probabilities, but logits are expected: attacks on the cross-entropy take the softmax of a "
        "softmax, and their gradients vanish. Remove the model's last softmax.",
        share=0.5,  # two logits may add up to one by chance
    ),
    "training-mode": Check(
        "Modules are still in training mode after eval(), so dropout and BatchNorm may act as in training. "
        "Let the model's eval() and train(False) reach every module."
    ),
    "stochastic": Check(
        "The logits of one image differ from one forward pass to the next: an attack sees another model than the one "
        "that is judged. Switch the randomness off in eval mode, or attack the average over many passes."
    ),
    "batch-dependent": Check(
        "The logits of an image change with the images beside it, as under BatchNorm in training mode, so a "
        "result depends on the batch. Make eval() reach every module, and let nothing mix the examples of a batch."
    ),
    "dynamic": Check(
        "The model takes gradients inside its forward pass, to adapt to its input or to purify it, which "
        "gradient attacks may not see through. Use an adaptive attack, made for this model."
    ),
    "zero-gradient": Check(
        "The gradient at the clean image is zero or not finite, so gradient attacks cannot move. Look for rounding, "
        "thresholds, detach() or saturation; attack without gradients, or through a smooth approximation (BPDA)."
    ),
    "saturated-ce": Check(
        "The gradient of the cross-entropy is zero or not finite where that of the margin is not: the logits are so "
        "large that softmax is flat. Attack with loss=margin or loss=dlr."
    ),
    "gradient-mismatch": Check(
        "The gradient is not that of images a grey level away, or not what finite differences say: a wave is laid over "
        "the input, or the gradient is changed on its way back. Attack without gradients, with gradients averaged "
        "over nearby images, or through a smooth approximation (BPDA).",
        share=0.1,  # networks are not linear; a wave may be laid over some images only
        of_right=True,
    ),
    "one-step-beats-many": Check(
        f"One step of FGSM fools what PGD with many steps does not: {_MASKED}. Use more steps and restarts, other "
        "losses, and an attack without gradients.",
        share=_BORDER,
    ),
    "noise-beats-gradient": Check(
        f"Random noise inside the threat fools what PGD does not: {_MASKED}. Use more steps and restarts, other "
        "losses, and an attack without gradients.",
        share=_BORDER,
    ),
    "search-beats-gradient": Check(
        f"A short random search, Square, fools what PGD does not: {_MASKED}. Use more steps and restarts, other "
        "losses, and an attack without gradients.",
        share=_BORDER,
    ),
    "unbounded-survives": Check(
        f"PGD that may change every pixel to any value still does not fool the model: {_MASKED}. Attack without "
        "gradients, or through a smooth approximation (BPDA)."
    ),
    "square-beats-white-box": Check(
        f"Square, which uses no gradient, fools what the white-box attacks do not: {_MASKED}. Trust the worst case "
        "only after an attack made for this model.",
        share=_BORDER,
    ),
    "blind-start": Check(
        "Every search of the attack began where its gradient is zero, so its failure says nothing about robustness. "
        "Look for saturated logits (loss=margin or loss=dlr), rounding, thresholds or detach(); attack without "
        "gradients, or through a smooth approximation (BPDA)."
    ),
    "out-of-budget": Check(
        "The attack returned images outside the threat's set, or NaN: they do not count, so its failure says nothing "
        "about robustness. Project what the attack returns with `threat.project`."
    ),
    "unconverged": Check(
        "Singular values or eigenvalues did not reach the tolerance; the residual beside each bounds its error. Where "
        "there are such settings, allow more `products` or `iterations`, or a larger `basis`. They do not help where "
        "rounding is the limit, as for a branch with σ near 1e-6."
    ),
    "few-classes": Check(
        "The model has too few classes for the DLR loss (it needs 3, with targets 4), so the margin loss was "
        "used. Say so where the number is compared with others of AutoAttack."
    ),
}


@dataclass(frozen=True)
class SanityWarning:
    code: str
    label: str  # of the probe or study that found it
    count: int  # examples with the symptom, or parts of a study
    n: int
    meaning: str  # and what to do about it; empty for a code that has no text
    of_study: bool = False

    @property
    def where(self) -> str:
        found_by = "parts, study" if self.of_study else "examples, probe"
        return f"{self.count} of {self.n} {found_by} {self.label}"

    def __str__(self) -> str:
        return f"warning: {self.code} ({self.where})" + (f": {self.meaning}" if self.meaning else "")


FEWEST = 20  # examples needed to judge clean accuracy


def accuracy_warnings(
    label: str, right: np.ndarray[Any, Any], y: np.ndarray[Any, Any], classes: int
) -> list[SanityWarning]:
    """Warn if all examples are of one class, or if the interval of accuracy has that of guessing."""
    n, wrong = len(right), int(len(right) - np.count_nonzero(right))
    if len(np.unique(y)) == 1:
        meaning = f"All examples are of class {int(y[0])}, so accuracy says little: shuffle the data, or take more."
        return [SanityWarning("one-class", label, n, n, meaning)]
    if wilson(n - wrong, n).low <= 1 / classes:
        meaning = (
            f"They are wrong: clean accuracy may be no better than guessing among {classes} classes. Does the model "
            "expect normalised images (bastion.wrap(model, mean=…, std=…)), or its classes in another order "
            "(`class_map`)?"
        )
        return [SanityWarning("at-chance", label, wrong, n, meaning)]
    return []


def is_check(column: str) -> bool:
    return COLUMN in column


def warnings(
    columns: Mapping[str, np.ndarray[Any, Any]], clean_accuracy: float = 1.0, studies: Collection[str] = ()
) -> list[SanityWarning]:
    """Return the warnings of a measurement's columns in the order of CHECKS, then those of plug-ins.

    `studies` are the labels of those that are no probes.
    """
    found = []
    for name in filter(is_check, columns):
        label, _, code = name.partition(COLUMN)
        check = CHECKS.get(code, Check(""))
        count, n = int(np.count_nonzero(columns[name])), len(columns[name])
        if count > check.share * n * (clean_accuracy if check.of_right else 1.0):
            found.append(SanityWarning(code, label, count, n, check.meaning, label in studies))
    ranks = {code: rank for rank, code in enumerate(CHECKS)}
    return sorted(found, key=lambda each: ranks.get(each.code, len(ranks)))
