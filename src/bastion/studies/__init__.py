"""Studies by name: what is measured of a model as a whole."""

from bastion.registry import Registry
from bastion.types import Study

studies: Registry[Study] = Registry("study", __name__, Study)
__getattr__ = studies.by_class_name  # the classes of plug-ins, imported when they are asked for
