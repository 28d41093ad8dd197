"""Studies by name: what is asked of a whole model."""

from bastion.registry import Registry
from bastion.types import Study

studies: Registry[Study] = Registry("study", __name__, Study)
