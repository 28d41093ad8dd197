"""Probes by name: what is measured of a model, example by example."""

from bastion.registry import Registry
from bastion.types import Probe

probes: Registry[Probe] = Registry("probe", __name__, Probe)
__getattr__ = probes.by_class_name  # the classes of plug-ins, imported when they are asked for
