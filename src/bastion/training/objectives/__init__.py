"""Objectives by name: an inner maximisation and an outer loss."""

from typing import Any

from bastion.registry import Registry
from bastion.types import Objective

objectives: Registry[Objective] = Registry("objective", __name__, Objective)


def __getattr__(name: str) -> Any:
    """The classes of plug-ins, imported when they are asked for."""
    return objectives.by_class_name(name)
