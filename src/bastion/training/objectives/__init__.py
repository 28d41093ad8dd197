"""Objectives by name: an inner maximisation and an outer loss."""

from bastion.registry import Registry
from bastion.types import Objective

objectives: Registry[Objective] = Registry("objective", __name__, Objective)
__getattr__ = objectives.by_class_name  # the classes of plug-ins, imported when they are asked for
