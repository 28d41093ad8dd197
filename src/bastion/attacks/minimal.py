"""The smallest adversarial perturbation: FAB's, then reduced by bisection over the radius with targeted APGD."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bastion import journal
from bastion.acceleration import Accelerated, accelerate
from bastion.attacks import attacks
from bastion.attacks.apgd import APGD
from bastion.attacks.engine import clean_logits, run_searches, skip_misclassified
from bastion.attacks.fab import FAB, BoundarySteps
from bastion.attacks.losses import likeliest_wrong
from bastion.forward import Best, check_batch
from bastion.settings import AtLeastOne, Count, settings
from bastion.threat import Norm, Threat
from bastion.types import Attack, Batch


@attacks.register("minimal")
@settings
class Minimal(Attack):
    """The nearest adversarial example; the threat should be as large as the box, so that it does not limit the search.

    Each step of the bisection attacks every example at its own radius, starting at its nearest adversarial example,
    projected to that radius.
    """

    fab_steps: Count = 100  # of FAB, which comes first
    fab_targets: AtLeastOne = 9  # of FAB
    bisections: Count = 10  # of each example's radius
    steps: Count = 40  # of APGD at each radius, for each target
    targets: AtLeastOne = 3  # of APGD

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        _, batch = check_batch(model, batch, "minimal")
        if len(batch.x) == 0:
            return batch.x
        accelerated, best = accelerate(model), Best(batch.x)
        with accelerated.ready(batch.x):
            clean = clean_logits(accelerated, batch)
            skip_misclassified(best, clean, batch, accelerated.rounding)
            fab = BoundarySteps(self._fab, threat, seed, clean.shape[1])
            targets = likeliest_wrong(clean, batch.y, self.fab_targets)
            run_searches(fab, accelerated, batch, threat, best, targets=targets, goal="nearest")
            self._bisect(accelerated, batch, threat, best, clean, seed)
        return best.x

    @property
    def _fab(self) -> FAB:
        return FAB(steps=self.fab_steps, targets=self.fab_targets)

    @property
    def _apgd(self) -> APGD:
        return APGD(steps=self.steps, loss="dlr", targets=self.targets, phases=False)

    def passes(self, norm: Norm) -> int:
        return self._fab.passes(norm) + (self.bisections + 1) * self._apgd.passes(norm)

    def revisions(self, norm: Norm) -> tuple[int, ...]:
        return self.revision, FAB.revision, APGD.revision

    def _bisect(self, model: Accelerated, batch: Batch, threat: Threat, best: Best, clean: Tensor, seed: int) -> None:
        """Bisect, for each example, between the largest radius at which APGD fails and the smallest with success."""
        attack = self._apgd
        targets = likeliest_wrong(clean, batch.y, self.targets)
        low = torch.zeros(len(batch.x), dtype=torch.float64, device=batch.x.device)
        high = torch.where(best.fooled, threat.distance(batch.x, best.x), threat.eps)
        for turn in range(self.bisections + 1):
            # First at the threat's radius, if FAB found nothing; then at the midpoint, from the nearest one known.
            radius = (low + high) / 2 if turn else high
            wanted = ~best.settled & (best.fooled if turn else ~best.fooled)
            rule = attack.rule(threat.norm, radius, clean.shape[1], seed)
            rule.starts = best.x if turn else None
            tried = Best(batch.x)
            tried.close(~wanted)
            with journal.attacking(len(batch.x), 0):  # progress is reported after it
                run_searches(rule, model, batch, threat, tried, targets=targets)
            better = tried.settled & wanted  # by a margin above rounding
            best.x[better], best.fooled[better] = tried.x[better], True
            high = torch.where(better, torch.minimum(radius, threat.distance(batch.x, tried.x)), high)
            low = torch.where(wanted & ~better, radius, low)
            if journal.budget_if_due():
                left = int((~best.settled).sum()) * (self.bisections - turn) * attack.passes(threat.norm)
                journal.report_progress(left, int((~best.fooled).sum()))
