"""Loggers by name: where a run's numbers go besides its own `log.jsonl`."""

from typing import Any

from bastion.registry import Registry
from bastion.types import Logger

loggers: Registry[Logger] = Registry("logger", __name__, Logger)  # type: ignore[type-abstract]


def __getattr__(name: str) -> Any:
    """The classes of plug-ins, imported when they are asked for."""
    return loggers.by_class_name(name)
