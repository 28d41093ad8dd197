"""Packages that only some loggers need."""

from __future__ import annotations

import importlib
from typing import Any

from bastion.errors import BastionError


def installed(package: str, logger: str) -> Any:
    """The package, or one line that says what to do."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise BastionError(
            f"the logger '{logger}' needs the package {package} ({error}); `pip install {package}`, or leave it out of "
            "`loggers`"
        ) from error
