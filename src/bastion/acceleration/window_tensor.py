"""Windows that go through a model in place of whole images.

A `WindowTensor` holds the changed window of each image. What torch does to images is done to the windows; what lies
around them comes from an `ActivationCache` of the known images. Where windows have grown over most of the image, or the
model does what is not known to be local, whole images go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bastion.acceleration.windows import Grown, Pair, Window, column, firsts, pair, within

LARGEST_SHARE = 0.6  # of the image that a window may cover
LOOKUP_COST = 2e7  # multiplications that take as long as one look into the cache
CACHE_BYTES = 1 << 30  # bytes that the cache may take

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # orders of axes: channels last, and back


class CannotFollow(Exception):
    """The model does not do what it did before, or what can be followed."""


class ActivationCache:
    """What a model made of the known images on its way, in the order in which it is looked for."""

    def __init__(self) -> None:
        self.learning = True
        self.slots: list[Tensor] = []  # (B, H, W, C), with a margin
        self.changes: list[tuple[Tensor, Window, Pair]] = []  # to each slot: pixels (B, h · w, C), where, its margin
        self.settings: list[tuple[Any, ...]] = []  # what went into each operation on windows beside them, …
        self.marks: list[list[Any]] = []  # … and how to know it again
        self.followed = 0
        self.saved = 0  # multiplications, for all images
        self.bytes_left = CACHE_BYTES

    def recall(self) -> None:
        """From the first slot on."""
        self.learning, self.changes, self.followed = False, [], 0

    def follow(self, *settings: Any) -> None:
        """The next operation on windows. It is local if what else goes into it does not change with the images."""
        marks = [_mark(setting) for setting in settings]
        if self.learning:
            self.settings.append(settings)  # stay alive, so that no other tensor takes their place
            self.marks.append(marks)
        elif self.followed == len(self.marks) or self.marks[self.followed] != marks:
            raise CannotFollow
        self.followed += 1

    def store(self, values: Tensor, margin: Pair = (0, 0)) -> Tensor:
        """Whole images, with a margin of zeros."""
        down, across = margin
        slot = F.pad(values.permute(LAST), (0, 0, across, across, down, down)).contiguous()
        self.bytes_left -= slot.numel() * slot.element_size()
        if self.bytes_left < 0:
            raise CannotFollow
        self.slots.append(slot)
        return slot.permute(FIRST)

    def look(self, pixels: Tensor, window: Window, margin: Pair = (0, 0)) -> Tensor:
        """The next slot; the change to it is noted."""
        if len(self.changes) == len(self.slots):
            raise CannotFollow
        self.changes.append((pixels, window, margin))
        return self.slots[len(self.changes) - 1]

    def accept(self, rows: Tensor) -> None:
        images = rows.nonzero()[:, 0]
        if len(images):
            for slot, (pixels, window, margin) in zip(self.slots, self.changes, strict=True):
                places = window.take(images).moved(column(margin)).places(_image(slot), images)
                slot.flatten(0, 2).index_copy_(0, places.flatten(), pixels[images].flatten(0, 1))

    def select(self, rows: Tensor) -> None:
        for number, slot in enumerate(self.slots):
            self.slots[number] = slot[rows]

    def is_through(self) -> bool:
        """Has the model done all that it did before?"""
        return self.followed == len(self.marks) and len(self.changes) == len(self.slots)

    def pays(self) -> bool:
        return self.saved > LOOKUP_COST * len(self.slots)


class TensorLike:
    """Goes through a model in place of images. Whatever they have and it has not, whole images have."""

    def whole(self) -> Tensor:
        raise NotImplementedError

    def local(self, func: Any, args: Any) -> Callable[..., Any] | None:
        """How to do the same to windows alone; None: it cannot be."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_") and not name.endswith("__"):  # would be written over
            raise CannotFollow
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        local = args[0].local(func, args) if isinstance(args[0], TensorLike) else None
        return _by_whole_images(func, args, kwargs) if local is None else local(*args, **kwargs)


class WindowTensor(TensorLike):
    """The changed window of each image. While the cache learns, whole images are in its place."""

    def __init__(self, cache: ActivationCache, values: Tensor, image: Pair, window: Window) -> None:
        self.cache, self.values, self.image, self.window = cache, values, image, window
        self.made: Tensor | None = None  # the whole images
        self.noted = False  # the values are in the cache

    @classmethod
    def learning(cls, cache: ActivationCache, x: Tensor, side: int) -> WindowTensor:
        anywhere = torch.zeros(2, len(x), dtype=torch.int64)
        return cls(cache, x, (x.shape[2], x.shape[3]), Window((side, side), anywhere))

    @classmethod
    def changed(cls, cache: ActivationCache, x: Tensor, corner: Tensor, side: int) -> WindowTensor:
        image = x.shape[2], x.shape[3]
        window = Window((side, side), within(corner.T, [length - side for length in image]))
        places = window.places(image) - firsts(len(x), math.prod(image))[:, None]
        values = x.flatten(2).gather(2, places[:, None].expand(-1, x.shape[1], -1))
        return cls(cache, values.view(*values.shape[:2], side, side), image, window)

    def local(self, func: Any, args: Any) -> Callable[..., Any] | None:
        if func in POINTWISE:
            return lambda window, *more, **named: window.each(func, *more, **named)
        return KNOWN.get(func)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:2], *self.image))

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return 4

    def __len__(self) -> int:
        return len(self.values)

    ndim = property(dim)
    dtype = property(lambda self: self.values.dtype)
    device = property(lambda self: self.values.device)

    @property
    def pixels(self) -> Tensor:
        """(B, h · w, C)"""
        return self.values.permute(LAST).flatten(1, 2)

    def each(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> WindowTensor:
        """The same is done to every pixel."""
        self.cache.follow(func, *args, *kwargs.values())
        if func is torch.relu_ or kwargs.get("inplace"):
            values = self.values.clone() if self.noted else self.values
            return self._becomes(WindowTensor(self.cache, func(values, *args, **kwargs), self.image, self.window))
        return WindowTensor(self.cache, func(self.values, *args, **kwargs), self.image, self.window)

    def _becomes(self, other: WindowTensor) -> WindowTensor:
        """As a tensor that is written over: whoever holds it sees it."""
        self.values, self.image, self.window = other.values, other.image, other.window
        self.made, self.noted = None, False
        return self

    def whole(self) -> Tensor:
        if self.made is None:
            self.made = self._whole()
        return self.made

    def _whole(self) -> Tensor:
        if self.cache.learning:
            return self.cache.store(self.values).clone()
        pixels, self.noted = self.pixels, True
        images = self.cache.look(pixels, self.window).clone()
        images.flatten(0, 2).index_copy_(0, self.window.places(self.image).flatten(), pixels.flatten(0, 1))
        return images.permute(FIRST)

    def around(self, window: Window, margin: Pair = (0, 0), *, holds: bool = True) -> Tensor:
        """What a window shows that holds this one, or most of it, and may reach into a margin."""
        if self.cache.learning:
            return self.cache.store(self.values, margin)
        pixels, self.noted, edge = self.pixels, True, column(margin)
        slot = self.cache.look(pixels, self.window, margin)
        seen = slot.flatten(0, 2).index_select(0, window.moved(edge).places(_image(slot)).flatten())
        own = self.window.moved(-window.start)
        places, pixels = own.places(window.size).flatten(), pixels.flatten(0, 1)
        if not holds:
            inside = own.inside(window.size).flatten()
            places, pixels = places[inside], pixels[inside]
        seen.index_copy_(0, places, pixels)
        return seen.view(len(self), *window.size, -1).permute(FIRST)

    def conv2d(
        self, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> WindowTensor | Tensor:
        if isinstance(padding, str):
            return torch.conv2d(self.whole(), weight, bias, stride, padding, dilation, groups)
        grown = Grown.by(self.image, self.window, pair(weight.shape[2:]), pair(stride), pair(padding), pair(dilation))
        spared = math.prod(grown.image) - math.prod(grown.window.size)
        if spared < (1 - LARGEST_SHARE) * math.prod(grown.image):
            return torch.conv2d(self.whole(), weight, bias, stride, padding, dilation, groups)
        self.cache.follow(weight, bias, stride, padding, dilation, groups)
        self.cache.saved += weight.numel() * spared * len(self) * self.cache.learning
        around = self.around(grown.seen, pair(padding), holds=pair(stride) == (1, 1))
        values = torch.conv2d(around, weight, bias, stride, 0, dilation, groups)
        return WindowTensor(self.cache, values, grown.image, grown.window)

    def batch_norm(
        self,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> WindowTensor | Tensor:
        settings = (mean, variance, weight, bias, training, momentum, eps)
        return F.batch_norm(self.whole(), *settings) if training else self.each(F.batch_norm, *settings)

    def dropout(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> WindowTensor | Tensor:
        return F.dropout(self.whole(), p, training, inplace) if training else self

    def permute(self, *axes: Any) -> Any:
        order = tuple(axes[0]) if len(axes) == 1 else axes
        return ChannelsLastWindow(self) if order == LAST else self.whole().permute(order)

    def combine(self, func: Callable[[Any, Any], Any], other: Any) -> Any:
        """With a number, numbers for each channel, or another window."""
        if isinstance(other, WindowTensor):
            return self._join(func, other)
        alike = not isinstance(other, Tensor) or other.numel() == 1
        if alike or (other.shape[-2:] == (1, 1) and math.prod(other.shape[:-3]) == 1):
            return self.each(func, other)
        return func(self.whole(), other)

    def _join(self, func: Callable[[Any, Any], Any], other: WindowTensor) -> Any:
        """In the larger window."""
        if self.image != other.image:
            return func(self.whole(), other.whole())
        self.cache.follow(func)
        window = max(self.window, other.window, key=lambda window: math.prod(window.size))
        values = []
        for part in (self, other):
            if not (part.window is window or self.cache.learning or part.window.is_inside(window)):
                raise CannotFollow
            values.append(part.values if part.window.size == window.size else part.around(window))
        return WindowTensor(self.cache, func(*values), self.image, window)

    def __add__(self, other: Any) -> Any:
        return self.combine(torch.add, other)

    def __sub__(self, other: Any) -> Any:
        return self.combine(torch.sub, other)

    def __mul__(self, other: Any) -> Any:
        return self.combine(torch.mul, other)

    def __truediv__(self, other: Any) -> Any:
        return self.combine(torch.div, other)

    def __iadd__(self, other: Any) -> Any:
        made = self + other
        if not isinstance(made, WindowTensor):
            raise CannotFollow
        return self._becomes(made)

    __radd__, __rmul__ = __add__, __mul__


class ChannelsLastWindow(TensorLike):
    """A window whose channels come last, as layers that look at one pixel at a time want it."""

    def __init__(self, tensor: WindowTensor) -> None:
        self.tensor = tensor

    def local(self, func: Any, args: Any) -> Callable[..., Any] | None:
        if func in POINTWISE or func is F.linear or (func is F.layer_norm and len(args[1]) == 1):
            return lambda window, *more, **named: window.each(func, *more, **named)
        return None

    def each(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> ChannelsLastWindow:
        if func is torch.relu_ or kwargs.get("inplace"):
            raise CannotFollow
        return ChannelsLastWindow(self.tensor.each(_last, func, *args, **kwargs))

    def permute(self, *axes: Any) -> Any:
        order = tuple(axes[0]) if len(axes) == 1 else axes
        return self.tensor if order == FIRST else self.whole().permute(order)

    def whole(self) -> Tensor:
        return self.tensor.whole().permute(LAST)


def _image(slot: Tensor) -> Pair:
    return slot.shape[1], slot.shape[2]


def _last(x: Tensor, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """What a function makes of images whose channels come last."""
    return func(x.permute(LAST), *args, **kwargs).permute(FIRST)


def _mark(setting: Any) -> Any:
    """Equal for the same, unchanged tensor, or for equal values of another kind."""
    if isinstance(setting, Tensor):
        return setting.data_ptr(), setting.shape, setting.stride(), setting._version
    return setting


def _by_whole_images(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Whatever it is; but windows are not written over by it."""
    name = getattr(func, "__name__", "")
    written = name.endswith("_") and (not name.endswith("__") or name in IN_PLACE)
    if kwargs.get("inplace") or "out" in kwargs or (written and isinstance(args[0], TensorLike)):
        raise CannotFollow
    return func(*map(_whole, args), **{key: _whole(value) for key, value in kwargs.items()})


def _whole(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_whole, value))
    return value.whole() if isinstance(value, TensorLike) else value


KNOWN: dict[Any, Callable[..., Any]] = {
    torch.conv2d: WindowTensor.conv2d,
    F.batch_norm: WindowTensor.batch_norm,
    F.dropout: WindowTensor.dropout,
    torch.add: WindowTensor.__add__,
    torch.sub: WindowTensor.__sub__,
    torch.mul: WindowTensor.__mul__,
    torch.div: WindowTensor.__truediv__,
}
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}
POINTWISE = {
    *(torch.relu, torch.relu_, F.relu, F.relu6, F.leaky_relu, F.elu, F.hardtanh, torch.sigmoid, torch.tanh),
    *(F.silu, F.gelu, F.mish, F.softplus, F.hardswish, F.hardsigmoid),
}
