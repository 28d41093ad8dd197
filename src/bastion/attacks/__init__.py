"""Attacks by name. An attack proposes points of a threat's set; whoever asked for them judges."""

from bastion.attacks.threat import Threat
from bastion.registry import Registry
from bastion.types import Attack

attacks: Registry[Attack] = Registry("attack", __name__, Attack)  # type: ignore[type-abstract]

__all__ = ["Attack", "Threat", "attacks"]
