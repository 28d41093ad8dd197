"""Images that maximise one unit of a model (direct feature visualisation, Engstrom et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bastion import rng
from bastion.attacks.pgd import ascend
from bastion.errors import BastionError
from bastion.forward import device_of, frozen
from bastion.settings import Count, NotNegative, Positive, settings
from bastion.studies import studies
from bastion.threat import Threat, at_size
from bastion.types import Batch, DataSet, Study, tapped

FIRST = 10  # number of units by default


@studies.register("feature-visualisation")
@settings
class FeatureVisualisation(Study):
    """Gradient ascent on a unit's activation, by ℓ2 steps of fixed length inside [0, 1]; one part per unit.

    A unit is a logit, an input of the last linear layer, or a channel of a block's output, averaged over positions. The
    image is regularised only by `smoothness`. For the penultimate layer, gradients pass the last ReLU even where it is
    off, as in the authors' code: a unit that is off could not be activated otherwise.
    """

    layer: Literal["logits", "penultimate"] | int = "penultimate"  # a number: the block; -1 is the last one
    units: tuple[Count, ...] = ()  # empty: the first 10
    start: Literal["noise", "image"] = "noise"  # N(0.5, 0.05²) in each pixel, or the test image of the part's number
    steps: Count = 200
    step: Positive | None = None  # None: 1 at 224×224, in proportion to √pixels at other sizes
    smoothness: NotNegative = 0.0  # weight of the total variation: mean |difference| of neighbours, down plus across

    facts: ClassVar[Mapping[str, str]] = {
        "unit": "its number in the layer",
        "before": "its activation at the start",
        "activation": "its activation at the end",
        "start": "the image at the start, in bytes",
        "image": "the image at the end, in bytes",
    }

    @property
    def reads(self) -> Mapping[str, int | None]:
        return {"test": len(self.units) or FIRST} if self.start == "image" else {}

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return len(self._units(model, data))

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        x0 = self._start(model, data, part, seed)
        unit = torch.tensor(self._units(model, data)[part : part + 1], device=x0.device)
        batch = Batch(torch.tensor([part], device=x0.device), x0, unit)
        layer = Activations(model, self.layer, smoothness=self.smoothness)
        with frozen(model):
            x = ascend(
                layer,
                batch,
                Threat("l2", x0.numel() ** 0.5),  # the whole box
                lambda activations, unit: activations.gather(1, unit[:, None])[:, 0],
                x0,
                steps=self.steps,
                size=at_size(1, x0) if self.step is None else self.step,
            )
        return {
            "unit": unit[0],
            "before": layer.plain(x0)[0, unit[0]],
            "activation": layer.plain(x)[0, unit[0]],
            "start": _bytes(x0[0]),
            "image": _bytes(x[0]),
        }

    def _units(self, model: nn.Module, data: DataSet) -> tuple[int, ...]:
        grey = torch.full((1, *data.shape), 0.5, device=device_of(model))
        count = Activations(model, self.layer).plain(grey).shape[1]
        if wrong := [unit for unit in self.units if unit >= count]:
            raise BastionError(
                f"study feature-visualisation: no unit {wrong[0]} in the layer {self.layer}, which has {count}; "
                f"choose from 0 to {count - 1}"
            )
        return self.units or tuple(range(min(FIRST, count)))

    def _start(self, model: nn.Module, data: DataSet, part: int, seed: int) -> Tensor:
        if self.start == "image":
            return data.test.batch([part % len(data.test)]).x.to(device_of(model))
        noise = rng.normal(seed, torch.tensor([part]), "feature visualisation", data.shape)
        return (0.5 + noise / 20).clamp(0, 1).to(device_of(model))


class Activations(nn.Module):
    """A model that returns the units of one of its layers instead of logits, minus the smoothness penalty."""

    def __init__(self, model: nn.Module, layer: str | int, *, smoothness: float = 0.0) -> None:
        super().__init__()
        self.model, self.layer, self.smoothness = model, layer, smoothness
        self.training = model.training
        self._relus: int | None = None  # number of ReLUs in a forward pass

    def forward(self, x: Tensor) -> Tensor:
        units = self._units(x)
        return units - self.smoothness * total_variation(x)[:, None] if self.smoothness else units

    def plain(self, x: Tensor) -> Tensor:
        """(B, units) without a gradient, and without the penalty."""
        with torch.no_grad():
            return self._units(x)

    def _units(self, x: Tensor) -> Tensor:
        if self.layer == "logits":
            logits: Tensor = self.model(x)
            return logits
        if not isinstance(self.layer, str):
            return block_channels(self.model, x, self.layer)
        if self._relus is None:
            with torch.no_grad(), OpenRelu() as counted:
                self.model(x)
            self._relus = counted.count
        with OpenRelu(self._relus):
            return penultimate(self.model, x)


class OpenRelu(TorchFunctionMode):
    """Counts ReLUs; the gradient of the one with this number is that of the identity."""

    RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.hardtanh)

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.RELUS:
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.count != self.number:
            return func(*args, **(kwargs or {}))
        x, *rest = args
        return x + (func(x.detach().clone(), *rest, **(kwargs or {})) - x).detach()  # clone: it may be in place


def penultimate(model: nn.Module, x: Tensor) -> Tensor:
    """(B, D): the input of the last linear layer that is run on one vector per image, which is the head."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].ndim == 2 and len(args[0]) == len(x):
            seen.append(args[0])

    hooks = [each.register_forward_pre_hook(keep) for each in model.modules() if isinstance(each, nn.Linear)]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise BastionError(
            f"study feature-visualisation: {type(model).__name__} runs no nn.Linear on one vector for each image, so "
            "it has no penultimate layer; set `layer` to logits, or to the number of a block"
        )
    return seen[-1]


def block_channels(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """(B, channels): a block's output, averaged over positions."""
    shown = tapped(model, "study feature-visualisation, layer")
    blocks = shown.blocks()
    if not -len(blocks) <= number < len(blocks):
        raise BastionError(
            f"study feature-visualisation: no block {number}, the model has {len(blocks)}; "
            f"choose from 0 to {len(blocks) - 1}, or from -1 to {-len(blocks)} from the end"
        )
    with shown.tap("blocks") as taps:
        model(x)
    output = taps.blocks[blocks[number].name]
    if output.ndim == 4 and not is_channels_last(output):
        return output.mean((2, 3))
    return output.flatten(1, -2).mean(1)  # (B, places, channels)


def is_channels_last(output: Tensor) -> bool:
    """Whether a 4-D output is (B, H, W, C), as in Swin: H equals W, and C differs."""
    return output.shape[1] == output.shape[2] != output.shape[3]


def total_variation(x: Tensor) -> Tensor:
    """(B,): mean |difference| of vertical neighbours, plus that of horizontal ones."""
    return x.diff(dim=2).abs().mean((1, 2, 3)) + x.diff(dim=3).abs().mean((1, 2, 3))


def _bytes(image: Tensor) -> Tensor:
    return (255 * image).round().to(torch.uint8)
