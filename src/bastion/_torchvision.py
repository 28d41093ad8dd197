"""Makes `import torchvision`, and so `import timm`, work beside a CPU build of torch.

torchvision's usual wheel is compiled against CUDA. Beside a CPU torch its compiled operators do not load, but its
Python half still registers gradients and shape rules for two of them (`nms`, `qnms`) at import time and
fails with `operator torchvision::nms does not exist`. bastion uses no detection operator, so declaring
the two schemas is enough. Where torchvision loads by itself nothing changes.

`import bastion` installs the finder, without importing torch; a later `import timm` then works.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_REGISTERING = ("torchvision._autograd_registrations", "torchvision._meta_registrations")
_declared: list[Any] = []  # keeps the library, and so its schemas, alive


class TorchvisionFinder(MetaPathFinder):
    """Finds no module; before a module that registers is imported, declares the operators that
    `torchvision.extension` could not load."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _REGISTERING and not _declared and not _operators_loaded():
            _declare()
        return None


def _operators_loaded() -> bool:
    has_ops = getattr(sys.modules.get("torchvision.extension"), "_has_ops", None)
    return bool(has_ops()) if has_ops else True


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
    _declared.append(library)


def install() -> None:
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())
