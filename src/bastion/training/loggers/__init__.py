"""Loggers by name: where a run's numbers go besides its own `log.jsonl`."""

from bastion.registry import Registry
from bastion.types import Logger

loggers: Registry[Logger] = Registry("logger", __name__, Logger)  # type: ignore[type-abstract]
__getattr__ = loggers.by_class_name  # the classes of plug-ins, imported when they are asked for
