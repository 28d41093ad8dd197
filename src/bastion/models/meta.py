"""Networks without numbers: shapes alone, which take no memory and little time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What initial values are made of. On the meta device torch works out the shape of each result in Python, which takes
# most of the time in which a network is made there.
FILLING = {
    getattr(Tensor, name)
    for name in ("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_", "copy_")
}


class _Unfilled(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in FILLING and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


@contextmanager
def meta() -> Iterator[None]:
    """Inside, tensors are made on torch's meta device, and nothing fills them."""
    with torch.device("meta"), _Unfilled():
        yield
