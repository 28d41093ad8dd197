"""A plug-in is found by being there, and every value it is built with is checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bastion import BastionError, Threat
from bastion.attacks import Attack, attacks
from bastion.attacks.pgd import PGD
from bastion.probes import probes
from bastion.registry import Registry


class Word(str):
    """What another one makes."""


class Product:
    """What the registry `things` makes."""


class Thing(Product):
    def __init__(
        self, *, size: int, ratio: float = 0.5, threat: Threat | None = None, attack: Attack | None = None
    ) -> None:
        self.size, self.ratio, self.threat, self.attack = size, ratio, threat, attack


@dataclass(frozen=True)
class Positive(Product):
    value: float

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError(f"value must be positive, got {self.value}")


@pytest.fixture
def things() -> Registry[object]:
    registry: Registry[object] = Registry("thing", "bastion.probes", Product)
    registry.register("thing")(Thing)
    registry.register("positive")(Positive)
    return registry


def test_nested_plug_ins_and_dataclasses_are_built_from_their_specs(things: Registry[Thing]) -> None:
    thing = things.build(
        {"name": "thing", "size": 3, "threat": {"norm": "l2", "eps": 0.5}, "attack": {"name": "pgd", "steps": 2}}
    )
    assert thing.threat == Threat("l2", 0.5)
    assert thing.attack == PGD(steps=2)
    assert things.build({"name": "thing", "size": 3, "attack": "pgd"}).attack == PGD()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "thin"}, r"here.name: unknown thing 'thin'; did you mean 'thing'\?"),
        ({"name": "thing"}, "here.size: missing"),
        ({"name": "thing", "size": 1, "raito": 2}, r"here.raito: unknown key; did you mean 'ratio'\?"),
        ({"name": "thing", "size": "a"}, "here.size: expected a whole number, got 'a'"),
        (
            {"name": "thing", "size": 1, "threat": {"norm": "l2", "esp": 1}},
            "here.threat.esp: unknown key; did you mean 'eps'",
        ),
        (
            {"name": "thing", "size": 1, "threat": {"norm": "l3", "eps": 1}},
            "here.threat.norm: unknown norm 'l3'; known: l1, l2, linf",
        ),
        (
            {"name": "thing", "size": 1, "attack": {"name": "pgd", "stps": 1}},
            "here.attack.stps: unknown key; did you mean 'steps'",
        ),
        ({"name": "positive", "value": -1}, "here: value must be positive, got -1.0"),
        (7, "here: expected one thing as {name: …}, got 7"),
    ],
)
def test_mistakes_are_named_with_their_path(things: Registry[object], spec: object, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        things.build(spec, "here")


def test_what_the_caller_gives_the_spec_may_not_set(things: Registry[Thing]) -> None:
    assert things.build({"name": "thing"}, size=4).size == 4
    with pytest.raises(BastionError, match="size: unknown key"):
        things.build({"name": "thing", "size": 3}, size=4)


def test_check_finds_mistakes_without_building(things: Registry[object]) -> None:
    things.check({"name": "positive", "value": -1})  # only building would notice
    with pytest.raises(BastionError, match="unknown key"):
        things.check({"name": "positive", "vlue": -1})


def test_two_plug_ins_may_not_share_a_name(things: Registry[object]) -> None:
    with pytest.raises(BastionError, match="'thing' is defined twice"):
        things.register("thing")(Positive)


PLUGIN = """
from dataclasses import dataclass
from bastion.attacks import Attack, attacks

@attacks.register("nothing")
@dataclass(frozen=True)
class Nothing(Attack):
    def __call__(self, model, batch, threat, *, seed):
        return batch.x
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of attacks in $BASTION_PLUGINS, as a process finds it that has not looked for attacks yet."""
    monkeypatch.setenv("BASTION_PLUGINS", str(tmp_path))
    monkeypatch.setattr(attacks, "_factories", dict(attacks._factories))
    monkeypatch.setattr(attacks, "_discovered", False)
    (tmp_path / "attacks").mkdir()
    return tmp_path / "attacks"


def test_plug_ins_outside_the_package_are_found_by_being_there(plugins: Path) -> None:
    (plugins / "nothing.py").write_text(PLUGIN)
    assert repr(attacks.build("nothing")) == "Nothing()"
    assert {"nothing", "pgd"} < {*attacks.names()}


def test_a_plug_in_may_not_replace_a_built_in_one(plugins: Path) -> None:
    (plugins / "pgd.py").write_text(PLUGIN.replace('"nothing"', '"pgd"').replace("Nothing", "PGD"))
    twice = "attack 'pgd' is defined twice: in bastion.attacks.pgd and in bastion_plugins.attacks.pgd"
    with pytest.raises(BastionError, match=twice):
        attacks.names()


def test_a_plug_in_folder_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, things: Registry[object]
) -> None:
    monkeypatch.setenv("BASTION_PLUGINS", "/nowhere")
    with pytest.raises(BastionError, match="BASTION_PLUGINS: /nowhere is not a folder"):
        things.names()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threat": {"norm": "linf", "eps": True}}, "p.threat.eps: expected a number, got True"),
        ({"threat": {"norm": "linf", "eps": "0.03"}}, "p.threat.eps: expected a number, got '0.03'"),
        ({"threat": {"norm": "linf", "eps": 8}}, "p.threat.eps: pixels are in"),
        ({"attack": {"name": "pgd", "steps": "10"}}, "p.attack.steps: expected a whole number, got '10'"),
        (
            {"attack": {"name": "pgd", "steps": -1}},
            "p.attack.steps: input should be greater than or equal to 0",
        ),
        ({"attack": {"name": "pgd", "random_start": "no"}}, "p.attack.random_start: expected true or false, got 'no'"),
        ({"attack": {"name": "pgd", "random_start": 1}}, "p.attack.random_start: expected true or false, got 1"),
        ({"attack": {"name": "pgd", 3: 4}}, "p.attack.3: unknown key"),
    ],
)
def test_values_of_another_kind_are_refused_where_they_stand(values: dict[str, Any], message: str) -> None:
    spec = {"name": "adversarial", "threat": {"norm": "linf", "eps": 0.1}, "attack": "pgd", **values}
    with pytest.raises(BastionError, match=message):
        probes.build(spec, "p")


def test_a_fraction_is_a_number_in_python_too() -> None:
    assert Threat("linf", "8/255").eps == 8 / 255  # type: ignore[arg-type]
    with pytest.raises(BastionError, match="threat.eps: expected a number, got '8/0'"):
        Threat("linf", "8/0")  # type: ignore[arg-type]


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    assert attacks.build({"name": "square", "queries": 5e3}).queries == 5000  # type: ignore[attr-defined]
    with pytest.raises(BastionError, match="attack.queries: expected a whole number, got 2.5"):
        attacks.build({"name": "square", "queries": 2.5})


def test_a_plug_in_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "broken.py").write_text("def broken(:\n")
    monkeypatch.setenv("BASTION_PLUGINS", str(tmp_path))
    with pytest.raises(BastionError, match=r"broken.py: cannot be imported: SyntaxError"):
        Registry("attack", "bastion.attacks", type("Product", (), {})).names()


def test_a_key_of_finish_that_the_factory_takes_is_the_factorys() -> None:
    def finish(product: str, /, *, size: int = 0, colour: str = "red") -> str:
        return f"{product} finished {size} {colour}"

    def own(size: int = 1) -> Word:
        return Word(f"own {size}")

    registry: Registry[Word] = Registry("word", "bastion.probes", Word, finish=finish)  # type: ignore[arg-type]
    registry.register("own")(own)
    registry.register("plain")(lambda: Word("plain"))
    assert registry.build({"name": "own", "size": 5, "colour": "blue"}) == "own 5 finished 0 blue"
    assert registry.build({"name": "plain", "size": 5}) == "plain finished 5 red"
    assert registry.finish("made", {"size": 2}) == "made finished 2 red"
    with pytest.raises(BastionError, match="word.size: expected a whole number"):
        registry.finish("made", {"size": "two"})
