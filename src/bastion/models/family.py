"""How a family of networks enters the registry: a function or class that builds it, and a name for each size."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from bastion.models import models
from bastion.models.classifier import Backbone, Blocks, Category, Renames

F = TypeVar("F", bound=Callable[..., nn.Module])

SMALL: Mapping[str, Any] = {"num_classes": 10, "img_size": 32}  # defaults for CIFAR-10 instead of ImageNet
# Options with the same names in all of timm's classes. A builder that hands them on unchanged declares **timm for them.
TIMM: Mapping[str, Any] = {"num_classes": 1000, "in_chans": 3, "drop_path_rate": 0.0}


class Size:
    """One network of a family: the positional arguments of the builder, and defaults for options of a recipe."""

    def __init__(self, about: str, /, *architecture: Any, **defaults: Any) -> None:
        self.about, self.architecture, self.defaults = about, architecture, defaults


def family(
    sizes: Mapping[str, Size],
    *,
    paper: str,
    blocks: tuple[Blocks, ...],
    category: Category | None = None,
    renames: Renames = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[F], F]:
    """Register every size of what a function or a class builds.

    The builder's keyword-only arguments are the options of a recipe; num_classes, in_chans and img_size are among them.
    `defaults` are those of all sizes.
    """

    def add(build: F) -> F:
        for name, size in sizes.items():
            make = functools.partial(build, *size.architecture, **{**(defaults or {}), **size.defaults})
            describe = functools.partial(Backbone, paper=paper, category=category, blocks=blocks, renames=renames)
            models.register(name)(_factory(build, make, describe, size.about))
        return build

    return add


def _factory(
    build: Callable[..., nn.Module], make: functools.partial[nn.Module], describe: Callable[..., Backbone], about: str
) -> Callable[..., Backbone]:
    """What the registry calls with the options of a recipe, with the signature that they are checked against."""
    signature = _signature(make)

    @functools.wraps(build.__init__ if inspect.isclass(build) else build)
    def factory(**options: Any) -> Backbone:
        bound = signature.bind(**options)
        bound.apply_defaults()
        given = bound.arguments
        shape = (given["in_chans"], given["img_size"], given["img_size"])
        return describe(make(**given), given["num_classes"], shape)

    factory.__signature__ = signature  # type: ignore[attr-defined]
    factory.__annotations__ = {**factory.__annotations__, **{name: type(default) for name, default in TIMM.items()}}
    factory.__doc__ = about
    return factory


def _signature(make: functools.partial[nn.Module]) -> inspect.Signature:
    """The arguments still open, with the options of `TIMM` in the place of **timm."""
    own = inspect.signature(make)
    parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    if len(parameters) < len(own.parameters):
        for name, default in TIMM.items():
            if name not in own.parameters:
                default = make.keywords.get(name, default)
                parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    return own.replace(parameters=parameters)
