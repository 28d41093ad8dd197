"""Probes by name: what is measured of a model, example by example."""

from typing import Any

from bastion.registry import Registry
from bastion.types import Probe

probes: Registry[Probe] = Registry("probe", __name__, Probe)


def __getattr__(name: str) -> Any:
    """The classes of plug-ins, imported when they are asked for."""
    return probes.by_class_name(name)
