"""How a family of networks enters the registry: what builds it, and a name for each of its sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from bastion.models import models
from bastion.models.classifier import Backbone, Blocks, Category, Renames

F = TypeVar("F", bound=Callable[..., nn.Module])

SMALL: Mapping[str, Any] = {"num_classes": 10, "img_size": 32}  # defaults of a small size in a family of large ones


class Size:
    """One network of a family: what the builder gets by position, and its defaults for what recipes may set."""

    def __init__(self, about: str, /, *architecture: Any, **defaults: Any) -> None:
        self.about, self.architecture, self.defaults = about, architecture, defaults


def family(
    sizes: Mapping[str, Size],
    *,
    paper: str,
    blocks: tuple[Blocks, ...],
    category: Category | None = None,
    renames: Renames = (),
) -> Callable[[F], F]:
    """Register every size of what a function or a class builds.

    Keyword-only arguments are the options of a recipe; num_classes, in_chans and img_size are among them.
    """

    def add(build: F) -> F:
        for name, size in sizes.items():
            make = functools.partial(build, *size.architecture, **size.defaults)
            facts = functools.partial(Backbone, paper=paper, category=category, blocks=blocks, renames=renames)
            factory = functools.wraps(_typed(build))(_factory(make, facts))
            factory.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]
            factory.__doc__ = size.about
            models.register(name)(factory)
        return build

    return add


def _factory(make: Callable[..., nn.Module], facts: Callable[..., Backbone]) -> Callable[..., Backbone]:
    signature = inspect.signature(make)

    def factory(**options: Any) -> Backbone:
        bound = signature.bind(**options)
        bound.apply_defaults()
        given = bound.arguments
        shape = (given["in_chans"], given["img_size"], given["img_size"])
        return facts(make(**options), given["num_classes"], shape)

    return factory


def _typed(build: Callable[..., nn.Module]) -> Callable[..., Any]:
    """What has the annotations of the arguments."""
    return build.__init__ if inspect.isclass(build) else build
