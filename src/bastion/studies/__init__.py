"""Studies by name: what is measured of a model as a whole."""

from typing import Any

from bastion.registry import Registry
from bastion.types import Study

studies: Registry[Study] = Registry("study", __name__, Study)


def __getattr__(name: str) -> Any:
    """The classes of plug-ins, imported when they are asked for."""
    return studies.by_class_name(name)
