"""What is listed without being imported is what is there when it is; what is in a wrong place is told."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import timm

from bastion import BastionError, plugins
from bastion.attacks import attacks
from bastion.listing import listed, timm_names
from bastion.registry import Registry
from bastion.types import Attack

ATTACK = '''
from bastion.attacks import Attack, attacks

@attacks.register("nothing")
class Nothing(Attack):
    """Returns the image."""

    def __call__(self, model, batch, threat, *, seed):
        return batch.x
'''


@pytest.mark.parametrize("name", sorted(plugins.PACKAGES.keys() - {"figures"}))
def test_names_read_from_files_are_those_of_the_registry(name: str) -> None:
    registry: Registry[Any] = getattr(importlib.import_module(plugins.PACKAGES[name]), name)
    kind = "data" if name == "datasets" else name
    names = [each for each in registry.names() if not each.endswith("/*") and _is_shipped(registry, each)]
    assert [row[0] for row in listed(kind) if row[0] != "timm/NAME"] == names


def _is_shipped(registry: Registry[Any], name: str) -> bool:
    """Not registered by another test."""
    return registry.factory(name).__module__.startswith("bastion.")


def test_names_of_timm_are_those_that_it_registers() -> None:
    assert timm_names() == sorted(f"timm/{name}" for name in timm.list_models())


@pytest.mark.parametrize("place", ["nothing.py", "attack/nothing.py", "probes/nothing.py"])
def test_a_plug_in_in_a_wrong_folder_is_one_line(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(ATTACK)
    monkeypatch.setenv("BASTION_PLUGINS", str(tmp_path))
    with pytest.raises(BastionError, match=f"'nothing' is registered with `attacks`.*move it to {tmp_path}/attacks/"):
        listed("attacks")


def test_a_class_of_another_kind_is_refused_where_it_is_registered() -> None:
    with pytest.raises(BastionError, match="attack 'own' in .*: Own is not an Attack; subclass bastion.types.Attack"):
        attacks.register("own")(type("Own", (), {}))
    with pytest.raises(BastionError, match="attack 'own' in .*: Own has no __call__"):
        attacks.register("own")(type("Own", (Attack,), {}))


def test_what_a_factory_makes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "_factories", dict(attacks._factories))
    attacks.register("three")(lambda: 3)
    with pytest.raises(BastionError, match="attack 'three' made int, not an Attack"):
        attacks.build("three")


def install(folder: Path, content: str) -> None:
    """A package with plug-ins, as pip would leave it."""
    (folder / "stranger").mkdir()
    (folder / "stranger" / "__init__.py").write_text("raise RuntimeError('not to be imported for a list')\n")
    (folder / "stranger" / "found.py").write_text(content)
    info = folder / "stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[bastion.plugins]\nany = stranger.found\n")


def test_plug_ins_of_installed_packages_are_listed_and_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, ATTACK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(attacks, "_factories", dict(attacks._factories))
    assert listed("attacks", "nothing") == [("nothing", "Returns the image.")]
    monkeypatch.setattr(attacks, "_discovered", False)
    with pytest.raises(BastionError, match=r"plug-ins of stranger \(stranger.found\) cannot be imported: RuntimeError"):
        attacks.names()
    (tmp_path / "stranger" / "__init__.py").write_text("")
    monkeypatch.setattr(attacks, "_discovered", False)
    importlib.invalidate_caches()
    assert type(attacks.build("nothing")).__name__ == "Nothing"
