"""The smallest perturbation that fools: FAB's nearest point, then bisection over the radius with targeted APGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion.attacks import attacks
from bastion.attacks.apgd import APGD
from bastion.attacks.asking import ready
from bastion.attacks.engine import Findings, clean_logits, hunt
from bastion.attacks.fab import FAB, BoundarySteps
from bastion.attacks.losses import likeliest_wrong
from bastion.attacks.threat import Threat
from bastion.attacks.victim import Victim, under_attack
from bastion.errors import BastionError
from bastion.registry import check_fields
from bastion.types import Batch


@attacks.register("minimal")
@dataclass(frozen=True, kw_only=True)
class Minimal:
    """The nearest fooling point of the threat's set; give a threat as large as the box to find it wherever it is.

    Each bisection attacks every example at its own radius, from its nearest fooling point drawn in to that radius.
    """

    fab_steps: int = 100
    fab_targets: int = 9
    bisections: int = 10
    steps: int = 40  # of APGD at each radius, for each target
    targets: int = 3

    def __post_init__(self) -> None:
        check_fields(self, "minimal")
        if min(self.fab_steps, self.bisections, self.steps) < 0 or min(self.fab_targets, self.targets) < 1:
            raise BastionError(f"minimal: need steps and bisections >= 0 and at least one target, got {self}")

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        batch = ready(model, batch, "minimal")
        if len(batch.x) == 0:
            return batch.x
        with under_attack(model, batch.x) as victim:
            clean = clean_logits(victim, batch)
            found = Findings(batch.x)
            found.begin(clean, batch, victim.rounding)
            fab = BoundarySteps(FAB(steps=self.fab_steps, targets=self.fab_targets), threat, seed, clean.shape[1])
            targets = likeliest_wrong(clean, batch.y, self.fab_targets)
            hunt(fab, victim, batch, threat, found, targets=targets, goal="nearest")
            self._narrow(victim, batch, threat, found, clean, seed)
        return found.x

    def _narrow(self, victim: Victim, batch: Batch, threat: Threat, found: Findings, clean: Tensor, seed: int) -> None:
        """Halve the gap between the largest radius that failed and the smallest that did not, for each example."""
        attack = APGD(steps=self.steps, loss="dlr", targets=self.targets, phases=False)
        targets = likeliest_wrong(clean, batch.y, self.targets)
        low = torch.zeros(len(batch.x), dtype=torch.float64, device=batch.x.device)
        high = torch.where(found.fooled, threat.distance(batch.x, found.x), threat.eps)
        for turn in range(self.bisections + 1):
            # First the whole radius, where FAB found nothing; then halves, from the nearest point known.
            radius = (low + high) / 2 if turn else high
            wanted = ~found.settled & (found.fooled if turn else ~found.fooled)
            rule = attack.rule(threat.norm, radius, clean.shape[1], seed)
            rule.starts = found.x if turn else None
            tried = Findings(batch.x)
            tried.close(~wanted)
            hunt(rule, victim, batch, threat, tried, targets=targets)
            better = tried.settled & wanted  # beyond doubt: it takes the place of a point that fools
            found.x[better], found.fooled[better] = tried.x[better], True
            high = torch.where(better, torch.minimum(radius, threat.distance(batch.x, tried.x)), high)
            low = torch.where(wanted & ~better, radius, low)
