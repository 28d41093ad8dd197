"""Makes `import torchvision`, and so `import timm`, work beside a CPU build of torch.

torchvision's wheel is compiled against CUDA. Beside a CPU torch its compiled operators do not load, but its
Python half still registers gradients and shape rules for two of them (`nms`, `qnms`) at import time and
fails with `operator torchvision::nms does not exist`. bastion uses no detection operator, so declaring
the two schemas is enough. Where torchvision loads by itself this module changes nothing.

The packages whose modules import timm or torchvision (`data`, `models`, `studies`, `training`) import it first.
"""

from __future__ import annotations

import sys

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: torch.library.Library | None = None  # the schemas live as long as this object does


def _declare() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
    return library


try:
    import torchvision
except RuntimeError as error:
    if "operator torchvision::" not in str(error):
        raise
    # The failed import leaves half-initialised submodules behind; the second try must start clean.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared = _declare()
    import torchvision  # noqa: F401
