"""Sanity checks: models built to have one defect each, a healthy one, and how the warnings are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tests.conftest import MakeLinear
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.cli import notes_in_yellow
from bastion.measuring import sanity
from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredCase, Measurement
from bastion.measuring.runner import measure
from bastion.measuring.sanity import CHECKS, warnings
from bastion.models import Classifier
from bastion.probes.sanity import Sanity, probabilities
from bastion.run import Run, environment
from bastion.suite import Suite
from bastion.types import Batch, DataSet

N = 40
THREAT = Threat("linf", 0.05)
ELSEWHERE = {"square-beats-white-box", "blind-start", "out-of-budget", "few-classes", "unconverged"}  # other probes'


class Colours(nn.Module):
    """How red, green and blue an image is, times ten: right on all of `tiny_data`, with a margin of about 3."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * x.mean((2, 3))


class Dropping(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2, training=True))


class Stubborn(nn.Module):
    """A layer that stays in training mode whatever one says, before `Colours`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, Colours()

    def train(self, mode: bool = True) -> Stubborn:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


class Centred(Colours):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Softmax(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class HalfSoftmax(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1).half()


class Loud(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return 1e4 * super().forward(x)


class Rounded(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((255 * x).round() / 255)


class Detached(Colours):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Purified(Colours):
    """Asks itself which way the image is clearer, and goes no step."""

    def __init__(self, way: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            self.way(super().forward(point).logsumexp(1).sum(), point)
        return super().forward(x)


class NotFinite(Colours):
    """Has no answer to red images."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return torch.where(logits.argmax(1, keepdim=True) == 0, torch.inf, logits)


class Reversed(Colours):
    """The gradient points the wrong way, but for images whose pixels are all multiples of 1/255."""

    def forward(self, x: Tensor) -> Tensor:
        levels = 255 * x.detach()
        stored = (levels - levels.round()).abs().flatten(1).amax(1) < 1e-3
        return super().forward(torch.where(stored[:, None, None, None], x, 2 * x.detach() - x))


class Wavy(Colours):
    """A wave too fine to see changes the answers a little and the gradient by much more than it is."""

    def __init__(self, height: float, frequency: float) -> None:
        super().__init__()
        self.height, self.frequency = height, frequency

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.height * torch.sin(self.frequency * x))


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """Noise of three times its length, the same whenever the image is the same."""
        (x,) = context.saved_tensors
        return gradient * (1 + 3 * 2**0.5 * torch.sin(1e4 * x + torch.arange(x.shape[-1])))


class Disguised(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(NoisyGradient.apply(x))


class Cropped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """Of a quarter of the image only."""
        kept = torch.zeros_like(gradient)
        kept[..., :4, :4] = gradient[..., :4, :4]
        return kept


class OneCorner(Colours):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Cropped.apply(x))


class Coarse(Colours):
    """Computes in bf16 and returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16().float()


class Threshold(nn.Module):
    """Is the first pixel bright? In steps, so that nothing has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        bright = (x[:, 0, 0, 0] > 0.5).float()
        return 10 * torch.stack([1 - bright, bright], 1)


@pytest.fixture
def batch(tiny_data: DataSet) -> Batch:
    return tiny_data.test.batch(range(N))


def symptoms(model: nn.Module, batch: Batch, threat: Threat = THREAT, **options: Any) -> dict[str, int]:
    """How many examples show what; nothing of what none shows."""
    facts = Sanity(threat=threat, **options)(model.eval(), batch, seed=0)
    assert facts.keys() == {f"warning.{code}" for code in CHECKS.keys() - ELSEWHERE}
    assert all(column.dtype == torch.bool and column.shape == batch.y.shape for column in facts.values())
    counts = {name.removeprefix("warning."): int(column.sum()) for name, column in facts.items()}
    return {code: count for code, count in counts.items() if count}


@pytest.mark.parametrize("eps", [0, 0.05, 0.16, 0.5])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_healthy_model_has_no_symptom(batch: Batch, norm: Any, eps: float) -> None:
    scale = {"linf": 1, "l2": 12, "l1": 192}[norm]
    assert symptoms(Colours(), batch, Threat(norm, scale * eps)) == {}


def test_differences_that_are_rounded_away_are_no_symptom(batch: Batch) -> None:
    assert "gradient-mismatch" not in symptoms(Coarse(), batch)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_coarse_logits_of_many_classes_are_no_probabilities(kind: torch.dtype) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).to(kind)
    grain = torch.finfo(kind).eps
    assert not probabilities(logits.float(), grain).any()
    assert probabilities(logits.float().softmax(1).to(kind).float(), grain).all()


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("threat", [Threat("linf", 0.03), Threat("l2", 0.4), Threat("l1", 2.0)], ids=lambda t: t.norm)
def test_a_linear_model_has_no_symptom(make_linear: MakeLinear, classes: int, threat: Threat) -> None:
    """One step is the best that there is: many must not seem worse for being many."""
    model, batch = make_linear(classes=classes, n=64)
    assert symptoms(model, batch, threat) == {}


def test_a_trained_network_has_no_symptom(tiny_model: Classifier, tiny_data: DataSet, batch: Batch) -> None:
    optimizer = torch.optim.Adam(tiny_model.parameters(), lr=0.03)
    seen = tiny_data.train.batch(range(48))
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(tiny_model.train()(seen.x), seen.y).backward()
        optimizer.step()
    assert (tiny_model.eval()(batch.x).argmax(1) == batch.y).float().mean() > 0.9
    for eps in (0.02, 0.05, 0.1):
        assert symptoms(tiny_model, batch, Threat("linf", eps)) == {}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Dropping(), {"stochastic": N}),
        (Stubborn(nn.Dropout(0.2)), {"stochastic": N, "training-mode": N}),
        (Stubborn(nn.BatchNorm2d(3, affine=False)), {"batch-dependent": N, "training-mode": N}),
        (Centred(), {"batch-dependent": N}),
        (Purified(torch.autograd.grad), {"dynamic": N}),
        (Purified(lambda loss, point: torch.autograd.backward(loss, inputs=[point])), {"dynamic": N}),
        (Purified(lambda loss, point: loss.backward(inputs=[point])), {"dynamic": N}),
        (Softmax(), {"probabilities": N}),
        (HalfSoftmax(), {"probabilities": N}),
        (Loud(), {"saturated-ce": N, "unbounded-survives": N}),
        (Rounded(), {"zero-gradient": N, "unbounded-survives": N}),
        (Detached(), {"zero-gradient": N, "unbounded-survives": N}),
        (NotFinite(), {"nan": 14}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.filterwarnings("ignore:.*the model is in training mode")  # which is the point
def test_each_defect_has_its_symptoms_and_no_others(model: nn.Module, expected: dict[str, int], batch: Batch) -> None:
    assert symptoms(model, batch) == expected


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize(
    "model", [Wavy(0.01, 1000), Wavy(0.03, 1000), Wavy(0.003, 3000), Wavy(0.01, 500), Disguised(), OneCorner()]
)
def test_gradients_that_do_not_say_what_the_loss_does_are_found(model: nn.Module, norm: Any, batch: Batch) -> None:
    assert symptoms(model, batch, Threat(norm, THREAT.eps))["gradient-mismatch"] >= 0.8 * N


def test_an_attack_on_the_margin_sees_through_large_logits(batch: Batch) -> None:
    assert symptoms(Loud(), batch, loss="margin") == {"saturated-ce": N}


def test_only_right_examples_have_symptoms_of_attacks(batch: Batch) -> None:
    wrong = batch._replace(y=(batch.y + (torch.arange(N) < 25)) % 3)
    assert symptoms(Rounded(), wrong) == {"zero-gradient": 15, "unbounded-survives": 15}
    assert symptoms(Rounded(), batch._replace(y=(batch.y + 1) % 3)) == {}


def test_gradients_that_mislead_pgd_but_not_fgsm_are_found(batch: Batch) -> None:
    assert symptoms(Colours(), batch, Threat("linf", 0.19)) == {}
    assert symptoms(Reversed(), batch, Threat("linf", 0.19)) == {
        "gradient-mismatch": N,
        "one-step-beats-many": N,
        "search-beats-gradient": 39,
    }


def test_noise_that_finds_what_gradients_do_not_is_found() -> None:
    """A random point crosses the threshold with probability 0.3: one for PGD to start from, then four."""
    x = torch.full((400, 1, 4, 4), 0.5 - 0.4 * THREAT.eps)
    found = symptoms(Threshold(), Batch(torch.arange(400), x, torch.zeros(400, dtype=torch.long)))
    assert found["zero-gradient"] == 400
    survivors = found["unbounded-survives"]
    assert survivors == pytest.approx(400 * 0.7, abs=40)
    assert found["noise-beats-gradient"] == pytest.approx(survivors * (1 - 0.7**4), abs=20)
    assert "one-step-beats-many" not in found


def test_images_divided_twice_are_found_but_black_ones_are_only_black(batch: Batch) -> None:
    x = torch.cat([batch.x[:30] / 255, torch.zeros_like(batch.x[30:])])
    assert symptoms(Colours(), batch._replace(x=x))["input-range"] == 30


@pytest.mark.filterwarnings("ignore:.*the model is in training mode")  # which is the point
def test_a_single_image_is_checked_too(batch: Batch) -> None:
    one = batch.select(torch.tensor([3]))
    assert symptoms(Colours(), one) == {}
    assert symptoms(Dropping(), one) == {"stochastic": 1}
    assert "batch-dependent" in symptoms(Stubborn(nn.BatchNorm2d(3, affine=False)), one)


def test_the_checks_cost_what_they_say_and_leave_nothing_behind(batch: Batch) -> None:
    passes = {"forward": 0, "backward": 0}

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(10.0))

        def forward(self, x: Tensor) -> Tensor:
            passes["forward"] += len(x)
            logits = self.scale * x.mean((2, 3))
            if logits.requires_grad and x.requires_grad:
                logits.register_hook(self.count)
            return logits

        def count(self, gradient: Tensor) -> None:
            passes["backward"] += len(gradient)

    model, noise = Counted(), torch.get_rng_state()
    assert symptoms(model, batch) == {}
    # Two images more, once, by which the engine of Square finds its batch size.
    assert passes == {"forward": 104 * N + 2, "backward": 27 * N}
    assert model.scale.grad is None
    assert torch.equal(torch.get_rng_state(), noise)
    assert not batch.x.requires_grad


@pytest.mark.parametrize("options", [{"steps": 1}, {"forwards": 1}, {"tries": 0}])
def test_budgets_that_check_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(BastionError, match=rf"sanity.{next(iter(options))}: input should be greater than or equal to"):
        Sanity(threat=THREAT, **options)


def test_measured_checks_warn_and_are_no_accuracy(tiny_data: DataSet, tmp_path: Path) -> None:
    """Through the runner, which seeds the global generators anew for every batch."""
    suite = Suite.model_validate(
        {"probes": {"clean": "accuracy", "sanity": {"name": "sanity", "threat": {"norm": "linf", "eps": 0.05}}}}
    )
    facts = measure(Dropping(), tiny_data, suite, folder=tmp_path / "dropping", batch_size=13)
    assert list(facts.accuracies()) == ["clean"]
    assert facts.estimates() == {}
    assert [(each.code, each.label, each.count, each.n) for each in facts.warnings()] == [
        ("stochastic", "sanity", 40, 40)
    ]
    assert facts.table().splitlines()[-1].startswith("warning: stochastic (40 of 40 examples, probe sanity): The ")
    healthy = measure(Colours(), tiny_data, suite, folder=tmp_path / "healthy", batch_size=13)
    assert healthy.warnings() == []
    assert healthy.table().splitlines()[-1] == "sanity checks: 14, no warning"


def column(share: float, n: int = 1000) -> np.ndarray[Any, Any]:
    return np.arange(n) < round(share * n)


@pytest.mark.parametrize(
    ("code", "silent", "loud"),
    [
        ("zero-gradient", 0, 0.001),
        ("few-classes", 0, 1),
        ("square-beats-white-box", 0.002, 0.003),
        ("one-step-beats-many", 0.002, 0.003),
        ("probabilities", 0.5, 0.501),
        ("input-range", 0.5, 0.501),
        ("of-a-plug-in", 0, 0.001),
    ],
)
def test_a_warning_is_given_above_its_share(code: str, silent: float, loud: float) -> None:
    assert warnings({f"attack/warning.{code}": column(silent)}) == []
    (warning,) = warnings({f"attack/warning.{code}": column(loud)})
    assert (warning.code, warning.label, warning.count, warning.n) == (code, "attack", round(1000 * loud), 1000)


def test_a_model_that_is_mostly_wrong_is_warned_of_by_the_images_it_gets_right() -> None:
    """`facts_with` has a clean accuracy of 50 %."""
    assert facts_with(**{"gradient-mismatch": column(0.05)}).warnings() == []
    (warning,) = facts_with(**{"gradient-mismatch": column(0.06)}).warnings()
    assert (warning.code, warning.count, warning.n) == ("gradient-mismatch", 60, 1000)


def test_one_example_of_few_is_enough_at_the_border() -> None:
    assert warnings({"aa/warning.square-beats-white-box": column(1 / 400, 400)})


def test_warnings_come_in_the_order_of_the_table_and_plug_ins_last() -> None:
    codes = ["of-a-plug-in", "few-classes", "nan"]
    found = warnings({f"a/b/warning.{code}": column(1) for code in codes} | {"a/b/correct": column(1)})
    assert [each.code for each in found] == codes[::-1]
    assert {each.label for each in found} == {"a/b"}
    assert str(found[-1]) == "warning: of-a-plug-in (1000 of 1000 examples, probe a/b)"


def test_every_code_says_what_it_means_and_what_to_do() -> None:
    for code, check in CHECKS.items():
        assert code == code.lower()
        assert len(check.meaning) > 60
        assert check.meaning.endswith(".")
        assert ". " in check.meaning  # what it means; what to do


def test_the_page_on_warnings_says_what_the_warnings_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sanity.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    shares = {
        code: f"{100 * check.share:g} % of the images{' classified right' if check.of_right else ''}"
        for code, check in CHECKS.items()
        if check.share
    }
    assert [(code.strip("`"), meaning, above) for code, _, meaning, above in rows] == [
        (code, check.meaning, shares.get(code, "any image")) for code, check in CHECKS.items()
    ]


def facts_with(**columns: Any) -> Facts:
    columns = {f"sanity/{sanity.COLUMN[1:]}{name}": value for name, value in columns.items()}
    common: dict[str, Any] = {"kind": "probes", "store": "", "n": 1000, "spec": {}}
    clean = MeasuredCase(label="clean", role="clean", columns=("correct",), **common)
    checks = MeasuredCase(label="sanity", role="check", columns=tuple(columns), **common)
    about = Measurement(
        **environment(0),
        model="m",
        weights="",
        data={"name": "d", "split": "test", "fingerprint": "f"},
        classes=("a", "b"),
        suite="s",
        n=1000,
        cases=(clean, checks),
    )
    return Facts(Run(Path()), about, {"clean/correct": column(0.5), **columns})


def test_a_table_says_that_checks_were_made_only_if_they_were() -> None:
    assert facts_with().table().endswith("n = 1000")
    assert facts_with(nan=column(0)).table().endswith("n = 1000\nsanity checks: 1, no warning")
    assert "sanity checks" not in facts_with(nan=column(0.1), stochastic=column(0)).table()


def test_the_terminal_shows_warnings_in_yellow() -> None:
    table = facts_with(**{"[bold]odd": column(0.1)}).table()
    console = Console(force_terminal=True, color_system="standard", width=80, highlight=False)
    with console.capture() as shown:
        console.print(notes_in_yellow(table), soft_wrap=True)
    *others, last = shown.get().splitlines()
    assert last == "\x1b[33mwarning: [bold]odd (100 of 1000 examples, probe sanity)\x1b[0m"
    assert "\x1b" not in "".join(others)
    assert notes_in_yellow(table).plain == table
