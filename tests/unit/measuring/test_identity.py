"""A model is recognised: by weights, by what its modules are, and by answers that agree but for rounding."""

from __future__ import annotations

import collections
import copy
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from torch import Tensor, nn

from bastion import storage
from bastion.forward import Function
from bastion.measuring.identity import Identity, identify
from bastion.models import Classifier, checkpoint
from bastion.run import Run
from bastion.types import DataSet


@pytest.fixture
def of(tiny_data: DataSet) -> Callable[[nn.Module], Identity]:
    return lambda model: identify(model, tiny_data, "test")


class Shifted(nn.Module):
    """Two of these with equal weights are not equal models."""

    def __init__(self, shift: int = 0, **more: Any) -> None:
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.ones(1))
        vars(self).update(more)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.mean(dim=(2, 3))).roll(self.shift, 1)


class Wrapped(nn.Module):
    """Networks with the same weights and nearly the same answers."""

    def __init__(self, network: nn.Module, *, scale: float = 1.0, levels: int = 0, straight: bool = False) -> None:
        super().__init__()
        self.network, self.scale, self.levels, self.straight = network, scale, levels, straight

    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.levels * x).round() / self.levels if self.levels else x
        return self.scale * self.network(x + (rounded - x).detach() if self.straight else rounded)


def test_a_copy_is_the_same_model(of: Any, tiny_model: Classifier) -> None:
    assert of(tiny_model).matches(of(copy.deepcopy(tiny_model)))
    assert of(Shifted()).matches(of(Shifted()))


def test_training_mode_is_no_part_of_a_model(of: Any, tiny_model: Classifier) -> None:
    assert of(tiny_model.train()).matches(of(copy.deepcopy(tiny_model).eval()))


def test_other_weights_are_another_model(of: Any, tiny_model: Classifier) -> None:
    before = of(tiny_model)
    with torch.no_grad():
        tiny_model.network[0].weight[0, 0, 0, 0] += 1e-6
    assert not of(tiny_model).matches(before)


@pytest.mark.parametrize(
    "more",
    [
        {"shift": 1},
        {"unused": 0.5},
        {"sizes": [1, 2]},
        {"table": {"a": (1, 2)}},
        {"held": torch.ones(2)},
        {"call": torch.relu},
        {"call": functools.partial(torch.clamp, min=0.1)},
        {"call": lambda x: x},
        {"kind": torch.float64},
    ],
    ids=range(9),
)
def test_another_attribute_is_another_model(of: Any, more: dict[str, Any]) -> None:
    assert not of(Shifted()).matches(of(Shifted(**more)))
    assert of(Shifted(**more)).matches(of(Shifted(**more)))


def test_what_weights_and_attributes_do_not_show_is_part_of_the_model(of: Any, tiny_model: Classifier) -> None:
    def buffered(value: float) -> Shifted:
        model = Shifted()
        model.register_buffer("extra", torch.tensor(value), persistent=False)
        return model

    assert of(buffered(1.0)).matches(of(buffered(1.0)))
    assert not of(buffered(1.0)).matches(of(buffered(2.0)))
    before = of(tiny_model)
    tiny_model.network.forward = lambda x: nn.Sequential.forward(tiny_model.network, x)  # of a library's class
    assert not of(tiny_model).matches(before)

    def hook(module: nn.Module, inputs: Any, output: Any, scale: float = 1.0) -> None: ...

    models = [Shifted(), Shifted()]
    for model, scale in zip(models, (1.0, 2.0), strict=True):
        model.register_forward_hook(types.FunctionType(hook.__code__, globals(), "hook", (scale,)))
    assert not of(models[0]).matches(of(models[1]))


def test_sets_and_objects_are_described_by_what_they_hold(of: Any) -> None:
    make = [lambda: Shifted(names=frozenset("abcdef")), lambda: Shifted(config=types.SimpleNamespace(a=1, b={"x"}))]
    for model in make:
        assert of(model()).matches(of(model()))
    assert not of(Shifted(config=types.SimpleNamespace(a=1))).matches(of(Shifted(config=types.SimpleNamespace(a=2))))


class Slotted:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden

    def __repr__(self) -> str:
        return "Slotted"


def _array(middle: float) -> np.ndarray[Any, Any]:
    """Of which a repr shows only the ends."""
    return np.concatenate([np.zeros(1_000), [middle], np.zeros(1_000)])


def _parent(shift: int) -> nn.Module:
    """A module in a list that refers to the module which holds it."""
    child = Shifted(shift)
    child.parents = [Shifted(children_in_a_list=[child])]
    return child


@pytest.mark.parametrize(
    "make",
    [
        lambda k: [Shifted(k)],
        lambda k: {"step": nn.Sequential(Shifted(k))},
        lambda k: [_parent(k)],
        lambda k: Slotted(k),
        lambda k: Slotted([_array(k)]),
        lambda k: _array(1e-9 * k),
        lambda k: np.array([Slotted(k)], dtype=object),
        lambda k: collections.deque([_array(k)]),
        lambda k: [[[[[[torch.tensor(1 + 1e-6 * k)]]]]]],
        lambda k: Shifted(k).forward,
        lambda k: [1, k].count,
        lambda k: torch.Generator().manual_seed(k),
        lambda k: logging.getLogger(f"bastion.test.{k}"),
        lambda k: torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), *[nn.ReLU()] * k)).graph,
    ],
    ids=range(14),
)
def test_what_an_attribute_holds_is_part_of_the_model(of: Any, make: Callable[[int], Any]) -> None:
    """The models have the same weights and logits."""
    assert of(Shifted(held=make(1))).matches(of(Shifted(held=make(1))))
    assert not of(Shifted(held=make(1))).matches(of(Shifted(held=make(2))))


def test_which_of_two_equal_objects_is_used_is_part_of_the_model(of: Any) -> None:
    def model(which: int) -> Shifted:
        both = [Shifted(1), Shifted(2)]
        return Shifted(held=[*both, both[which]])

    assert of(model(0)).matches(of(model(0)))
    assert not of(model(0)).matches(of(model(1)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_models_are_recognised(of: Any, tiny_model: Classifier) -> None:
    network = nn.Sequential(tiny_model.network, nn.Hardtanh(-100, 100))
    other = nn.Sequential(tiny_model.network, nn.Hardtanh(-200, 100))
    x = torch.rand(1, 3, 8, 8)
    first, again, second = (of(torch.jit.trace(each.eval(), x)) for each in (network, network, other))
    assert first.matches(again)
    assert not first.matches(second)


def test_an_attribute_that_cannot_be_compared_equals_nothing(of: Any) -> None:
    with pytest.warns(UserWarning, match="holds a lock, which cannot be compared: stored facts of this model are not"):
        model = of(Shifted(lock=threading.Lock()))
    with pytest.warns(UserWarning, match="holds a lock"):
        assert not of(Shifted(lock=threading.Lock())).matches(model)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.warns(UserWarning, match="holds a list"):
        of(Shifted(endless=endless))


def test_what_a_function_holds_is_part_of_the_model(of: Any) -> None:
    def scaled(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: by * x

    assert of(Shifted(call=scaled(2))).matches(of(Shifted(call=scaled(2))))
    assert not of(Shifted(call=scaled(2))).matches(of(Shifted(call=scaled(3))))


def test_a_hook_makes_another_model(of: Any, tiny_model: Classifier) -> None:
    before = of(tiny_model)
    handle = tiny_model.network[0].register_forward_hook(lambda *_: None)
    assert not of(tiny_model).matches(before)
    handle.remove()
    assert of(tiny_model).matches(before)


@pytest.mark.parametrize(
    ("one", "other"),
    [({"levels": 16}, {"levels": 16, "straight": True}), ({}, {"levels": 4000}), ({}, {"scale": 1e5})],
)
def test_models_that_differ_in_their_gradients_alone_are_told_apart(
    of: Any, tiny_model: Classifier, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = of(Wrapped(tiny_model, **one)), of(Wrapped(tiny_model, **other))
    assert not first.matches(second)


def test_answers_tell_models_apart_that_look_the_same(of: Any) -> None:
    """What neither weights nor attributes show: a module-level switch."""
    first = of(Switched())
    Switched.on = True
    try:
        assert not of(Switched()).matches(first)
    finally:
        Switched.on = False


class Switched(Shifted):
    on = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.01 if Switched.on else 1.0)


LIMIT = 0.99  # of pixels; no image of the data is that bright, so answers do not show it


def _clipped(x: Tensor) -> Tensor:
    return x.clamp(max=LIMIT)


class Clipping(Shifted):
    limit = 0.99

    def clip(self, x: Tensor) -> Tensor:
        return x.clamp(max=self.limit)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_clipped(self.clip(x)))


def _unchanged(*_: Any) -> None:
    """A hook that changes nothing."""


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.modules[__name__], "LIMIT", 0.98),
        (sys.modules[__name__], "_clipped", lambda x: x),
        (Clipping, "limit", 0.98),
        (Clipping, "clip", lambda _, x: x),
        (nn.ReLU, "forward", lambda _, x: x.clamp(min=0)),
        (nn.modules.module, "_global_forward_hooks", {0: _unchanged}),
    ],
    ids=["constant", "function", "class attribute", "method", "library's method", "hook of all modules"],
)
def test_what_code_uses_is_part_of_the_model(
    of: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any
) -> None:
    model = Clipping(activation=nn.ReLU()) if where is not nn.ReLU else nn.Sequential(nn.ReLU(), Clipping())
    before = of(model)
    assert before.matches(of(model))
    monkeypatch.setattr(where, name, value)
    changed = of(model)
    assert changed.acts_as(before) and not changed.matches(before)


def test_the_network_that_a_function_calls_is_part_of_the_model(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuned by so little that answers on four images agree."""
    monkeypatch.setitem(globals(), "network", Shifted())

    def function(x: Tensor) -> Tensor:
        return network(x)  # type: ignore[name-defined, no-any-return]  # noqa: F821

    first = of(Function(function))
    assert first.matches(of(Function(function)))
    with torch.no_grad():
        globals()["network"].weight.mul_(1 + 1e-6)
    assert not of(Function(function)).matches(first)


def test_a_function_that_counts_its_calls_stays_the_same_model(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "queries", 0)

    def function(x: Tensor) -> Tensor:
        global queries
        queries += len(x)  # type: ignore[name-defined]
        return x.mean(dim=(2, 3))

    assert of(Function(function)).matches(of(Function(function))) and globals()["queries"] > 0


def test_variables_around_a_class_are_part_of_the_model(of: Any) -> None:
    def made(limit: float) -> nn.Module:
        class Inner(Shifted):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.clamp(max=limit))

        return Inner()

    assert of(made(1.0)).matches(of(made(1.0)))
    assert not of(made(1.0)).matches(of(made(2.0)))


def test_rounding_makes_no_other_model(of: Any, tiny_model: Classifier) -> None:
    identity = of(tiny_model)
    rounded = Identity(
        identity.weights,
        identity.data,
        identity.modules,
        [[value * (1 + 1e-5) for value in row] for row in identity.logits],
        [[value * (1 + 1e-4) for value in row] for row in identity.slopes],
    )
    assert identity.matches(rounded)


def test_an_attribute_that_a_library_adds_makes_no_other_model(of: Any, tiny_model: Classifier) -> None:
    before = of(tiny_model)
    tiny_model.network[0].added_by_an_upgrade = True
    assert of(tiny_model).matches(before)
    tiny_model.network[0].stride = (2, 2)
    assert not of(tiny_model).matches(before)


def test_a_model_on_other_data_is_kept_apart(tiny_model: Classifier, tiny_data: DataSet) -> None:
    from dataclasses import replace

    ours, other = (identify(tiny_model, replace(tiny_data, fingerprint=name), "test") for name in "ab")
    assert not ours.matches(other)
    assert not identify(tiny_model, tiny_data, "val").matches(identify(tiny_model, tiny_data, "test"))


def test_a_run_keeps_one_folder_for_each_model(of: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    one, two = of(Shifted()), of(Shifted(1))
    assert one.folder(run) == of(Shifted()).folder(run)
    assert one.folder(run) != two.folder(run)
    # Equal in all but the answers: the folder's name alone would not tell them apart.
    other = Identity(one.weights, one.data, one.modules, [[-v for v in row] for row in one.logits], one.slopes)
    assert other.folder(run) == one.folder(run).with_name(f"{one.folder(run).name}-2")
    assert other.folder(run) == other.folder(run)


def test_processes_that_start_together_take_the_same_folder(of: Any, tmp_path: Path) -> None:
    """A folder without its file is one that another process is about to write."""
    run, identity = Run(tmp_path), of(Shifted())
    (tmp_path / "facts" / storage.fingerprint([identity.weights, identity.data, identity.modules])).mkdir(parents=True)
    assert identity.folder(run) == identity.folder(run)
    assert len(list((tmp_path / "facts").iterdir())) == 1


def test_models_of_the_registry_are_recognised(tiny_data: DataSet) -> None:
    spec = {"name": "vit/micro", "img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    first, again, other = (
        identify(checkpoint.build(spec | more, mean=(0.5,) * 3, std=(0.5,) * 3), tiny_data, "test")
        for more in ({}, {}, {"num_heads": 4})
    )
    assert first.matches(again)
    assert first.weights == other.weights
    assert not first.matches(other)
