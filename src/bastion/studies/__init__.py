"""Studies by name: what is asked of a whole model."""

from typing import Any

from bastion.registry import Registry
from bastion.types import Study

studies: Registry[Study] = Registry("study", __name__, Study)


def __getattr__(name: str) -> Any:
    """The classes of plug-ins, imported when they are asked for."""
    return studies.by_class_name(name)
