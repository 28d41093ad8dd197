"""Logits by what a square changes are the model's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import pytest
import timm
import torch
from tests.conftest import unaccelerated
from tests.unit.acceleration.test_acceleration import unsettled
from torch import Tensor, nn
from torch.nn import functional as F

from bastion import Threat
from bastion.acceleration import Accelerated, Form, accelerate, incremental, window_tensor
from bastion.acceleration.incremental import Incremental
from bastion.attacks.square import Square
from bastion.models import checkpoint
from bastion.models.stems import ChannelNorm
from bastion.types import Batch

SIZE = (24, 20)


class Head(nn.Module):
    def __init__(self, *layers: nn.Module, channels: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers((x - 0.4) / 0.2).mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1)
        self.skip = nn.Conv2d(channels, out, 1, stride) if stride > 1 or channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.norm(self.first(x)), inplace=True))
        y += self.skip(x)
        return F.relu(y)


class Dense(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(x)], 1)


class Gate(nn.Module):
    """A mean over the image weighs its channels: not local."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


class Mlp(nn.Module):
    """Pixel by pixel, channels last, as ConvNeXt has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 9), nn.Linear(9, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = x.permute(0, 2, 3, 1)
        return x + self.down(F.gelu(self.up(self.norm(y)))).permute(0, 3, 1, 2)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Head(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.GELU(), channels=6),
    "strides": lambda: Head(nn.Conv2d(3, 6, 5, 3, 2), nn.SiLU(), nn.Conv2d(6, 4, 2, 2), channels=4),
    "gaps": lambda: Head(nn.Conv2d(3, 6, 3, 1, 2, 2), nn.Conv2d(6, 6, (1, 3), (2, 1), (0, 1), groups=3), channels=6),
    "holes": lambda: Head(nn.Conv2d(3, 4, 1, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1), channels=4),
    "same": lambda: Head(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, padding="same"), channels=4),
    "mirror": lambda: Head(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1, padding_mode="reflect"), channels=4),
    "residual": lambda: Head(nn.Conv2d(3, 6, 3, padding=1), Residual(6, 6), Residual(6, 8, 2), channels=8),
    "dense": lambda: Head(nn.Conv2d(3, 4, 3, padding=1), Dense(4), Dense(8), channels=16),
    "gate": lambda: Head(nn.Conv2d(3, 4, 3, padding=1), Gate(), nn.Conv2d(4, 4, 3, padding=1), channels=4),
    "pool": lambda: Head(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), Residual(4, 4), channels=4),
    "last": lambda: Head(nn.Conv2d(3, 6, 3, 2, 1), ChannelNorm(6), nn.GELU(), Mlp(6), Residual(6, 6), channels=6),
    "group norm": lambda: Head(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), Residual(4, 4), channels=4),
}


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks save little: here it pays always."""
    monkeypatch.setattr(window_tensor, "LOOKUP_COST", 0)


def network(name: str) -> nn.Module:
    torch.manual_seed(len(name))
    return unsettled(NETWORKS[name]()).requires_grad_(False)


def copied(network: nn.Module) -> Accelerated:
    """As if the network were the copy of a model."""
    accelerated = Accelerated(nn.Identity())
    accelerated.form = Form(network, 8, freezes=True)
    return accelerated


def near(network: nn.Module) -> Incremental:
    return Incremental(copied(network))


class Walk:
    """Kept images, and squares that are painted on them."""

    def __init__(self, images: int = 7, size: tuple[int, int] = SIZE) -> None:
        self.random = torch.Generator().manual_seed(1)
        self.kept = torch.rand(images, 3, *size, generator=self.random)
        self.whose = torch.arange(2 * images).view(images, 2)

    def step(self, side: int) -> tuple[Tensor, Tensor]:
        """Images with one square changed, and the corners; some at the edges."""
        spare = torch.tensor(self.kept.shape[2:]) - side
        corner = (torch.rand(len(self.kept), 2, generator=self.random) * (spare + 1)).long()
        corner[0], corner[-1] = 0, spare
        x = self.kept.clone()
        for image, (top, left) in zip(x, corner.tolist(), strict=True):
            image[:, top : top + side, left : left + side] = torch.rand(3, 1, 1, generator=self.random)
        return x, corner

    def accept(self, x: Tensor) -> Tensor:
        rows = torch.rand(len(x), generator=self.random) < 0.5
        self.kept[rows] = x[rows]
        return rows


@pytest.mark.parametrize("name", NETWORKS)
def test_answers_are_the_models(name: str) -> None:
    model, walk = network(name), Walk()
    tried = near(model)
    for side in (5, 5, 5, 3, 3, 3, 1, 1, 1, 3, 3):
        x, corner = walk.step(side)
        assert torch.allclose(tried.logits(x, walk.kept, corner, side, walk.whose), model(x), atol=1e-5)
        tried.accept(walk.accept(x))
        assert tried.known is not None and tried.cache.saved > 0


STRANGERS = [
    "resnet18",
    "mobilenetv2_100",
    "regnety_002",
    "convnext_atto",
    "repvgg_a0",
    "starnet_s1",
    "vit_tiny_patch16_224",
]


@pytest.mark.parametrize("name", STRANGERS)
def test_answers_are_those_of_models_from_elsewhere(name: str) -> None:
    size = 224 if name.startswith("vit") else 64
    torch.manual_seed(0)
    model, walk = unsettled(timm.create_model(name, num_classes=5)).requires_grad_(False), Walk(3, (size, size))
    with accelerate(model).ready(walk.kept) as accelerated:
        tried = Incremental(accelerated)
        for side in (7, 7, 7, 3, 3, 3):
            x, corner = walk.step(side)
            near, logits = tried.logits(x, walk.kept, corner, side, walk.whose), model(x)
            assert (near - logits).abs().max() <= incremental.CLOSE * logits.abs().max()
            tried.accept(walk.accept(x))
            assert tried.known is not None and tried.cache.saved > 0


@pytest.mark.parametrize("name", ["residual", "strides", "last"])
def test_windows_are_all_that_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, walk, seen = network(name), Walk(), []
    tried, plain = near(model), torch.conv2d
    first = walk.step(1)
    tried.logits(first[0], walk.kept, first[1], 1, walk.whose)
    x, corner = walk.step(1)

    def conv2d(x: Any, *rest: Any) -> Any:
        seen.append(x.shape[2] * x.shape[3])
        return plain(x, *rest)

    monkeypatch.setattr(torch, "conv2d", conv2d)
    tried.logits(x, walk.kept, corner, 1, walk.whose)
    assert seen[0] <= 64 and max(seen) <= 121  # of 480


def test_images_come_and_go() -> None:
    model, walk = network("residual"), Walk()
    tried = near(model)
    for rows in (range(7), (0, 2, 3, 6), (3, 0), (3, 1, 5), range(7)):
        x, corner = walk.step(3)
        chosen = torch.tensor(rows)
        logits = tried.logits(x[chosen], walk.kept[chosen], corner[chosen], 3, walk.whose[chosen])
        assert torch.allclose(logits, model(x[chosen]), atol=1e-5)
        taken = walk.accept(x)[chosen]
        tried.accept(taken)


def test_what_is_dropped_is_not_learned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, walk = network("residual"), Walk()
    tried = near(model)
    x, corner = walk.step(3)
    tried.logits(x, walk.kept, corner, 3, walk.whose)
    monkeypatch.setattr(tried, "_learns", None)  # not callable
    some = torch.tensor([5, 1])
    x, corner = walk.step(3)
    logits = tried.logits(x[some], walk.kept[some], corner[some], 3, walk.whose[some])
    assert torch.allclose(logits, model(x[some]), atol=1e-5)


class Steered(nn.Module):
    """Its weights, numbers or statistics come from the image: nothing it does is local, though it looks so."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm = way, nn.BatchNorm2d(3, affine=False, track_running_stats=way != "statistics")
        self.rest, self.weight = network("plain"), nn.Parameter(torch.rand(3, 3, 1, 1), requires_grad=False)
        self.register_buffer("level", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "weights":
            x = F.conv2d(x, self.weight * (1 + 1e-5 * x.mean()))
        elif self.way == "number":
            x = x * (1 + 1e-5 * float(x.mean()))
        elif self.way == "one for all":
            x = x * (1 + 1e-5 * x.mean((0, 2, 3), keepdim=True))
        elif self.way == "kept":
            self.level.copy_(1 + 1e-5 * x.mean())
            x = x * self.level
        else:
            x = x + 1e-5 * self.norm(x)
        return self.rest(x)


@pytest.mark.parametrize("way", ["weights", "number", "one for all", "kept", "statistics"])
def test_what_changes_with_the_images_is_not_taken_for_a_constant(way: str) -> None:
    """The difference is far too small to be seen in the answers."""
    model, walk = Steered(way).eval(), Walk()
    tried = near(model)
    x, corner = walk.step(3)
    tried.logits(x, walk.kept, corner, 3, walk.whose)
    assert tried.known is None


class Written(nn.Module):
    """Somebody else needs what is written over: before it, after it, or only where it is large."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.conv = way, nn.Conv2d(3, 6, 3, padding=1)
        self.rest, self.head = Residual(6, 6), nn.Linear(12, 5)
        self.cap = 1e9

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        before = y.mean((2, 3)) if self.way == "before" else y.new_zeros(len(y), 6)
        same = y
        if self.way == "sum":
            y += 1.5
        elif self.way == "clamp":
            y.clamp_(max=self.cap)
        elif self.way == "window":
            F.relu(y.permute(0, 2, 3, 1), inplace=True)
        else:
            F.relu(y, inplace=True)
        return self.head(torch.cat([self.rest(same).mean((2, 3)), before], 1))


@pytest.mark.parametrize("way", ["before", "after", "sum", "clamp", "window"])
def test_what_is_written_over_is_so_for_all_who_hold_it(way: str) -> None:
    torch.manual_seed(0)
    model, walk = Written(way).eval().requires_grad_(False), Walk()
    unsettled(model)
    tried = near(model)
    for step in range(8):
        x, corner = walk.step(3)
        model.cap = 1e9 if step < 4 else 0.1  # what is not seen when the cache is filled
        assert torch.allclose(tried.logits(x, walk.kept, corner, 3, walk.whose), model(x), atol=1e-5)
        tried.accept(walk.accept(x))


class Turning(nn.Module):
    """Goes another way from some pass on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.turned, self.first, self.rest = way, False, nn.Conv2d(3, 3, 3, padding=1), network("residual")

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.way == "shorter":
            return self.rest(y if self.turned else F.relu(y))
        if self.way == "sum":
            return self.rest(y * x if self.turned else y + x)
        if self.way == "whole" and self.turned:
            return self.rest(torch.cat([y[:, :1], y[:, 1:]], 1))
        if self.way == "none" and self.turned:
            return self.rest(x.flatten(1).view(*x.shape).view(x.shape))
        return self.rest(y)


@pytest.mark.parametrize("way", ["shorter", "sum", "whole", "none"])
def test_another_way_through_the_model_is_noticed(way: str) -> None:
    model, walk = Turning(way).eval().requires_grad_(False), Walk()
    tried = near(model)
    for step in range(6):
        x, corner = walk.step(3)
        model.turned = step >= 3
        assert torch.allclose(tried.logits(x, walk.kept, corner, 3, walk.whose), model(x), atol=1e-5)
        assert (tried.known is None) == model.turned
        tried.accept(walk.accept(x))


def test_answers_are_held_against_the_models_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "CHECKED", 4)
    model, walk = network("residual"), Walk()
    tried = near(model)
    for step in range(9):
        x, corner = walk.step(3)
        if step == 5:
            tried.cache.slots[0] += 1  # as if it were out of step
        logits = tried.logits(x, walk.kept, corner, 3, walk.whose)
        if step > 6:
            assert tried.useless == {3} and torch.allclose(logits, model(x), atol=1e-5)


@pytest.mark.parametrize("taken", [-1e9, -torch.inf])
def test_a_class_that_was_taken_out_hides_nothing(taken: float) -> None:
    logits = torch.tensor([[1.0, 2.0, taken], [30.0, 0.0, taken]])
    assert incremental._agree(logits + torch.tensor([0.0, 1e-5, 0.0]), logits)
    assert not incremental._agree(logits + torch.tensor([[0.0, 1e-4, 0.0], [0.0, 0.0, 0.0]]), logits)
    assert not incremental._agree(logits * torch.nan, logits)


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network("plain")

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor), "no tensor"
        return self.inner(x)


class Noisy(Strict):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * torch.randn(len(x), 5)


class Blank(Strict):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).log()


@pytest.mark.parametrize("model", [Strict(), Noisy(), Blank()], ids=["strict", "noisy", "nan"])
def test_a_model_that_cannot_be_followed_is_tried_itself(model: nn.Module) -> None:
    tried, walk = near(model), Walk()
    for _ in range(3):
        x, corner = walk.step(3)
        torch.manual_seed(0)
        logits = tried.logits(x, walk.kept, corner, 3, walk.whose)
        torch.manual_seed(0)
        assert torch.equal(logits.nan_to_num(), model(x).nan_to_num())
        tried.accept(walk.accept(x))
        assert tried.known is None and tried.useless == {3}


@pytest.mark.parametrize(
    ("accelerated", "kind", "side"),
    [
        (unaccelerated(network("plain"), 8), torch.float32, 3),  # as given: nobody knows what it keeps of a pass
        (copied(network("plain").double()), torch.float64, 3),
        (copied(network("plain")), torch.float32, 11),
    ],
    ids=["given", "double", "large"],
)
def test_where_it_is_not_done(accelerated: Accelerated, kind: torch.dtype, side: int) -> None:
    tried, walk = Incremental(accelerated), Walk()
    walk.kept = walk.kept.to(kind)
    x, corner = walk.step(side)
    assert torch.equal(tried.logits(x, walk.kept, corner, side, walk.whose), accelerated.logits(x))
    assert tried.known is None


@pytest.mark.parametrize("limit", ["LOOKUP_COST", "CACHE_BYTES"])
def test_what_does_not_pay_is_left(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_tensor, limit, 1e15 if limit == "LOOKUP_COST" else 1000)
    tried, walk = near(network("residual")), Walk()
    x, corner = walk.step(3)
    tried.logits(x, walk.kept, corner, 3, walk.whose)
    assert tried.known is None and not tried.cache.slots


def test_square_finds_the_same_adversarial_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "resnet/micro", "widths": (8, 16), "depths": (1, 1), "img_size": 16}
    model = unsettled(checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3, seed=0))
    x = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        batch = Batch(x=x, y=model(x).argmax(1), index=torch.arange(12))
    calls: list[int] = []
    changed = Incremental._changed_logits
    monkeypatch.setattr(Incremental, "_changed_logits", lambda self, *rest: (calls.append(1), changed(self, *rest))[1])
    square, threat = Square(queries=600), Threat("linf", 0.1)
    near_by = square(model, batch, threat, seed=0)
    assert len(calls) > 300
    monkeypatch.setattr(Incremental, "_learns", lambda *_: False)
    whole = square(model, batch, threat, seed=0)
    assert torch.equal(near_by, whole)
    assert 0 < (model(whole).argmax(1) == batch.y).sum() < 12  # some are fooled on the way, some never
