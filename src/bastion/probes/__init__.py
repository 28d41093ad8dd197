"""Probes by name: what is asked of a model, example by example."""

from bastion.registry import Registry
from bastion.types import Probe

probes: Registry[Probe] = Registry("probe", __name__, Probe)
