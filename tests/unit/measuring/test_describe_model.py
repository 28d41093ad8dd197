"""What a model is besides its weights: an attribute, a hook or code that differs makes another model."""

from __future__ import annotations

import collections
import functools
import importlib
import logging
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from tests import shifted
from tests.shifted import Shifted
from torch import Tensor, nn

from bastion.attacks.pgd import PGD
from bastion.forward import Function
from bastion.measuring.describe_model import describe_plugins
from bastion.measuring.identity import Identity, identify
from bastion.models import Classifier
from bastion.models.classifier import Blocks
from bastion.probes.adversarial import Adversarial
from bastion.threat import Threat
from bastion.types import Attack, Batch, DataSet


@pytest.fixture
def of(tiny_data: DataSet) -> Callable[[nn.Module], Identity]:
    return lambda model: identify(model, tiny_data, "test")


@pytest.mark.parametrize(
    "more",
    [
        {"shift": 1},
        {"unused": 0.5},
        {"text": "a name that descriptions use"},
        {"sizes": [1, 2]},
        {"table": {"a": (1, 2)}},
        {"held": torch.ones(2)},
        {"call": torch.relu},
        {"call": functools.partial(torch.clamp, min=0.1)},
        {"call": lambda x: x},
        {"kind": torch.float64},
    ],
    ids=range(10),
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


@pytest.mark.filterwarnings("ignore:`torch.jit")
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


def test_an_attribute_that_a_library_adds_makes_no_other_model(of: Any, tiny_model: Classifier) -> None:
    before = of(tiny_model)
    before.versions["torch"] = "1.0"
    tiny_model.network[0].added_by_an_upgrade = True
    assert of(tiny_model).matches(before) and before.matches(of(tiny_model))
    assert of(tiny_model).matches(replace(before, versions={}))  # as stored before versions were
    tiny_model.network[0].stride = (2, 2)
    assert not of(tiny_model).matches(before)


def test_an_attribute_of_ones_own_on_a_librarys_module_makes_another_model(of: Any, tiny_model: Classifier) -> None:
    before = of(tiny_model)
    tiny_model.network[0].limit = 0.1  # which code of one's own may read
    assert not of(tiny_model).matches(before)
    before.versions["timm"] = "0.1"  # of which this class is not
    assert not of(tiny_model).matches(before)


def test_a_field_that_is_added_to_the_declaration_of_blocks_makes_no_other_model(of: Any, tiny_model: Any) -> None:
    tiny_model._blocks = (Blocks("network.*", map_to=""),)
    first = of(tiny_model)
    assert first.modules[""]["_blocks"] == [{"is": "Blocks", "holds": {"names": "network.*"}}]
    tiny_model._blocks = (Blocks("network.*", map_to="0"),)
    assert not of(tiny_model).matches(first)


NETWORK = """
from tests import shifted
from tests.shifted import Shifted
{imports}

class Network(Shifted):
    def __init__(self):
        super().__init__()
        self.held = {held}

    {decorated}
    def forward(self, x):
        {first}
        return super().forward({call})
"""
DEFENCE = """
import functools

def guard(x):
    return x.clamp(max=0.99)

@functools.cache
def limit():
    return 0.99

class Guard:
    def __call__(self, x):
        return x.clamp(max=0.99)

    def clip(self, x):
        return self(x)

class Guards(list):
    def __call__(self, x):
        return x.clamp(max=0.99)

def guarded(forward):
    @functools.wraps(forward)
    def inner(self, x):
        return forward(self, x.clamp(max=0.99))
    return inner
"""
FILES = {
    "defence.py": DEFENCE,
    "outer.py": "import defence",
    "package/__init__.py": "",
    "package/inner.py": DEFENCE,
    "package/between.py": "from . import inner\ndef guard(x):\n    return inner.guard(x)",
}


@pytest.mark.parametrize(
    "parts",
    [
        {"imports": "import defence", "call": "defence.guard(x)"},
        {"imports": "import defence as other", "call": "other.Guard().clip(x)"},
        {"imports": "import outer", "call": "outer.defence.guard(x)"},
        {"imports": "import package.inner", "call": "package.inner.guard(x)"},
        {"imports": "from package.between import guard", "call": "guard(x)"},
        {"first": "import defence", "call": "defence.guard(x)"},
        {"first": "from package.between import guard", "call": "guard(x)"},
        {"imports": "import defence", "held": "defence", "call": "self.held.guard(x)"},
        {"imports": "import defence", "held": "defence.Guard()", "call": "self.held(x)"},
        {"imports": "import defence", "held": "[defence.Guard()]", "call": "self.held[0].clip(x)"},
        {"imports": "import defence", "held": "defence.Guards()", "call": "self.held(x)"},
        {"imports": "import defence", "held": "defence.Guard().clip", "call": "self.held(x)"},
        {"imports": "from defence import limit", "call": "x.clamp(max=limit())"},
        {"imports": "import defence", "decorated": "@defence.guarded"},
    ],
    ids=lambda parts: "; ".join(parts.values()),
)
def test_code_that_is_reached_through_modules_and_objects_is_part_of_the_model(
    of: Any, parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image of the data is as bright as the limit, so answers do not show it."""
    monkeypatch.syspath_prepend(tmp_path)
    usual = {"imports": "", "held": "None", "decorated": "", "first": "", "call": "x"}
    files = {"network.py": NETWORK.format(**usual | parts), **FILES}

    def made(limit: str) -> nn.Module:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text.replace("0.99", limit))
        for name in ("network", "defence", "outer", "package", "package.inner", "package.between"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        model: nn.Module = importlib.import_module("network").Network()
        model(torch.zeros(1, 3, 8, 8))
        return model

    first, again, other = (of(made(limit)) for limit in ("0.99", "0.99", "0.9800"))
    assert first.matches(again)
    assert first.acts_as(other) and not first.matches(other)


def test_values_in_modules_that_code_reads_are_part_of_the_model(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defence = types.ModuleType("defence")
    exec("LIMIT, UNUSED = 0.99, 1\ndef guard(x):\n    return x.clamp(max=LIMIT)", vars(defence))

    def function(x: Tensor) -> Tensor:
        return defence.guard(x).mean(dim=(2, 3))  # type: ignore[no-any-return]

    before = of(Function(function))
    monkeypatch.setattr(defence, "UNUSED", 2)
    assert of(Function(function)).matches(before)
    monkeypatch.setattr(defence, "LIMIT", 0.98)
    assert not of(Function(function)).matches(before)


def test_a_function_that_was_put_into_a_library_is_part_of_the_model(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return nn.functional.hardtanh(x).mean(dim=(2, 3))

    before = of(Function(function))
    monkeypatch.setattr(nn.functional, "hardtanh", lambda x: x.clamp(-1, 1))
    changed = of(Function(function))
    assert changed.acts_as(before) and not changed.matches(before)


def test_modules_of_libraries_are_recognised(of: Any, recwarn: pytest.WarningsRecorder) -> None:
    assert of(Shifted(functional=nn.functional)).matches(of(Shifted(functional=nn.functional)))
    assert not of(Shifted(functional=nn.functional)).matches(of(Shifted(functional=torch.special)))
    assert not recwarn


def test_two_globals_of_one_name_are_both_part_of_the_model(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class and of its base, which is of another file."""
    monkeypatch.setattr(shifted, "LIMIT", 0.99, raising=False)

    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.weight * x.clamp(max=LIMIT).mean(dim=(2, 3))).roll(self.shift, 1)

    base = types.FunctionType(forward.__code__, vars(shifted))
    base.__qualname__ = "Shifted.forward"
    monkeypatch.setattr(Shifted, "forward", base)
    before = of(Limited())
    assert of(Limited()).matches(before)
    for module in (shifted, sys.modules[__name__]):
        with monkeypatch.context() as patch:
            patch.setattr(module, "LIMIT", 0.98)
            assert not of(Limited()).matches(before)


class Limited(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(max=LIMIT))


def test_methods_that_other_modules_call_are_part_of_the_model(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Calling(Encoder()))
    before = of(model)
    assert before.matches(of(model))
    monkeypatch.setitem(globals(), "steps", 2)  # which only training reads
    assert of(model).matches(before)
    monkeypatch.setitem(globals(), "LIMIT", 0.98)
    assert not of(model).matches(before)


steps = 1


class Encoder(Shifted):
    def encode(self, x: Tensor) -> Tensor:
        return x.clamp(max=LIMIT)

    def fit(self) -> int:
        return steps


class Calling(Shifted):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.encoder.encode(x))


class Stepping(Attack):
    """An attack of one's own."""

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return _clipped(batch.x)


def test_code_that_plug_ins_use_names_their_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Adversarial(threat=Threat("linf", 0.1), attack=Stepping())
    before = describe_plugins(probe)
    assert describe_plugins(probe) == before
    monkeypatch.setitem(globals(), "LIMIT", 0.98)
    assert describe_plugins(probe) != before
    assert describe_plugins(Adversarial(threat=Threat("linf", 0.1), attack=PGD())) == {}  # versions tell


def test_the_version_of_an_installed_plug_in_names_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stepping, "__module__", "pytest.attacks")
    assert describe_plugins([Stepping()]) == {"pytest.attacks.Stepping": [metadata.version("pytest")]}
