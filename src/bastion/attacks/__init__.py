"""Attacks by name. An attack returns images inside a threat's set; `judge` decides which of them are adversarial."""

from bastion.registry import Registry
from bastion.threat import Threat
from bastion.types import Attack

attacks: Registry[Attack] = Registry("attack", __name__, Attack)  # type: ignore[type-abstract]
__getattr__ = attacks.by_class_name  # the classes of plug-ins, imported when they are asked for

__all__ = ["Attack", "Threat", "attacks"]
