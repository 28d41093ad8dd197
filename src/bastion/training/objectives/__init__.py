"""Objectives by name: an inner maximisation and an outer loss."""

from bastion.registry import Registry
from bastion.types import Objective

objectives: Registry[Objective] = Registry("objective", __name__, Objective)
