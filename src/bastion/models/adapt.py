"""Transfer of weights to another model of the family, with another head, stem or image size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from torch import nn

from bastion.errors import BastionError
from bastion.models import checkpoint
from bastion.models.classifier import Classifier
from bastion.models.positions import fit_to_shape


@dataclass
class TransferReport:
    """Names of the tensors that were loaded, interpolated, left as initialised, or not used."""

    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)  # kept their random initial values
    unused: list[str] = field(default_factory=list)  # tensors of the source

    def as_dict(self) -> dict[str, list[str]]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for word, names in (("resized", self.resized), ("new", self.new), ("of the source unused", self.unused)):
            if names:
                parts.append(f"{len(names)} {word} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})")
        return ", ".join(parts)


def transfer(source: Classifier, model: Classifier, new: Iterable[str] = ()) -> TransferReport:
    """Copy the source's weights to the model, except for the parts of the network named in `new`.

    The head is not copied if the number of classes differs; position embeddings and tables are interpolated. Any other
    tensor that only one of the models has, or that differs in shape, is an error.
    """
    fresh = tuple(new)
    own, theirs = model.network.state_dict(), source.network.state_dict()
    for part in fresh:
        if not any(_inside(name, (part,)) for name in own):
            raise BastionError(f"init.new: the network has no part '{part}'; its parts are {_parts(model.network)}")
    if model.num_classes != source.num_classes:
        fresh += (_head(model.network, model.num_classes),)
    done, misfits, chosen = TransferReport(), [], {}
    for name, tensor in own.items():
        if _inside(name, fresh):
            done.new.append(name)
        elif name not in theirs:
            misfits.append(f"{name} (the source has none)")
        elif theirs[name].shape == tensor.shape:
            chosen[name] = theirs[name]
            done.loaded.append(name)
        elif (fitting := fit_to_shape(name, theirs[name], tensor.shape)) is not None:
            chosen[name] = fitting
            done.resized.append(name)
        else:
            misfits.append(f"{name} ({tuple(theirs[name].shape)} in the source, {tuple(tensor.shape)} here)")
    for name in theirs:
        if _inside(name, fresh):
            done.unused.extend([] if name in own else [name])
        elif name not in own:
            misfits.append(f"{name} (only the source has it)")
    if misfits:
        shown = "; ".join(misfits[:3]) + (f"; and {len(misfits) - 3} more" if len(misfits) > 3 else "")
        raise BastionError(f"init: the weights do not fit: {shown}; name the parts that start anew in init.new")
    for name, tensor in chosen.items():
        own[name].copy_(tensor)
    return done


def resized(model: Classifier, size: int) -> Classifier:
    """The model with the same weights for another image size; position embeddings and tables are interpolated."""
    if model.spec is None:
        raise BastionError("resized: this model was not built from a spec, so it cannot be built at another size")
    mean, std = (tuple(each.flatten().tolist()) for each in (model.mean, model.std))
    other = checkpoint.build({**model.spec, "img_size": size}, mean=mean, std=std).to(model.mean)
    try:
        transfer(model, other)
    except BastionError as error:
        reason = "more than its position embeddings and tables is made for a size"
        raise BastionError(
            f"resized: {type(model.network).__name__} does not go to {size}: {reason} ({error})"
        ) from error
    return other.train(model.training)


def _inside(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _parts(network: nn.Module) -> str:
    return ", ".join(name for name, _ in network.named_children())


def _head(network: nn.Module, classes: int) -> str:
    """The name of the last linear layer with as many outputs as classes."""
    names = [
        name
        for name, module in network.named_modules()
        if classes in (getattr(module, "out_features", None), getattr(module, "out_channels", None))
    ]
    if not names:
        raise BastionError(
            f"init: no layer of {type(network).__name__} has {classes} outputs; name the head in init.new"
        )
    return str(names[-1])
