"""`bastion import`: load weights of another code base into one of bastion's models; no tensor is silently ignored."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bastion import storage
from bastion.errors import BastionError, did_you_mean, shown
from bastion.memory import check_memory
from bastion.models import checkpoint
from bastion.models.classifier import Backbone, Classifier
from bastion.models.normalisations import NORMALISATIONS, Stats

State = dict[str, Tensor]
MATCHES = ("name", "order")  # how the file's tensors are assigned to the model's

_CONTAINERS = ("state_dict", "model_state_dict", "model", "net")
_AVERAGES = ("state_dict_ema", "model_ema", "ema")
_PREFIXES = ("module.", "_orig_mod.", "base_model.", "model.", "1.")  # "1." is of Sequential(normaliser, model)
_MEANS = ("normalize.mean", "normalizer.mean", "normalizer.new_mean", "normalize.mu", "mu", "mean", "0.mean")
_STDS = ("normalize.std", "normalizer.std", "normalizer.new_std", "normalize.sigma", "sigma", "std", "0.std")
_COUNTER = "num_batches_tracked"
# What training scripts store beside the weights: their arguments, and numpy scalars under their old and new names.
_SCALAR: Callable[..., Any] = np.float64(0).__reduce__()[0]  # type: ignore[assignment]
_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "bool")),
]
# Tensors that are not weights: of attackers that were modules, of an unused stage in TRADES' WideResNet, and what
# weight averaging, profilers and attention layers leave in a state dict.
_NO_WEIGHTS = re.compile(
    r"^attacker\.|^sub_block1\.|^n_averaged$"
    r"|(^|\.)(total_ops|total_params|relative_position_index|attention_bias_idxs|attn_mask)$"
)


@dataclass
class Import:
    """The imported model, and what was found in the file."""

    model: Classifier
    container: str  # the entry of the file that held the weights
    stripped: list[str]  # prefixes of wrappers that were removed
    left_out: list[str] = field(default_factory=list)  # tensors that are not weights
    filled: list[str] = field(default_factory=list)  # counters of BatchNorm, which old files lack
    match: str = "name"

    def __str__(self) -> str:
        parts = [f"{len(self.model.network.state_dict()) - len(self.filled)} tensors loaded"]
        if self.container:
            parts.append(f"from '{self.container}'")
        if self.stripped:
            parts.append(f"without the prefix {''.join(self.stripped)}")
        if self.match == "order":
            parts.append("matched by order and shape, not by name: check its clean accuracy before you trust it")
        for word, names in (("left out", self.left_out), ("not in the file and set to zero", self.filled)):
            if names:
                parts.append(f"{word}: {_some(names)}")
        mean, std = (_numbers(each) for each in (self.model.mean, self.model.std))
        return f"{'; '.join(parts)}\nnormalised by mean {mean}, std {std}"

    def about(self, path: Path) -> dict[str, Any]:
        with storage.opened(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        how = {"match": self.match} if self.match != "name" else {}
        return {"imported": {"file": path.name, "sha256": digest, "container": self.container, **how}}


def import_file(
    path: Path,
    spec: Mapping[str, Any],
    *,
    ema: bool = False,
    normalize: str | Stats | None = None,
    match: str = "name",
) -> Import:
    """The classifier with the weights of a file. No code from the file is executed.

    `match` "order": the tensors have other names, but the order and shapes of the model's.
    """
    if match not in MATCHES:
        raise BastionError(f"import: --match is {' or '.join(MATCHES)}, got '{match}'")
    container, state = _contents(_read(path), path, ema)
    backbone = checkpoint.build_backbone(spec, "model")
    own = backbone.network.state_dict()
    left_out = [name for name in state if _NO_WEIGHTS.search(_bare(name)) and name not in own]
    state = {name: tensor for name, tensor in state.items() if name not in left_out}
    state, found, stripped = _unwrapped(state, own)
    state = _in_order(state, own, path) if match == "order" else _renamed(state, backbone)
    filled = [name for name in own if name.endswith(_COUNTER) and name not in state]
    state |= {name: own[name] for name in filled}
    state = {name: _shaped(tensor, own[name].shape if name in own else None) for name, tensor in state.items()}
    _check(state, own, path)
    _check_numbers(state, own, path)
    mean, std = _normalisation(found, normalize, backbone.shape[0], path)
    model = Classifier(backbone, mean, std, spec=dict(spec))
    try:
        model.network.load_state_dict(state)
    except RuntimeError as error:
        raise BastionError(f"import: {path}: its tensors cannot be copied into the model: {error}") from error
    return Import(model.eval(), container, stripped, left_out, filled, match)


def parse_stats(text: str) -> Stats:
    """`0.5,0.5,0.5/0.5,0.5,0.5`: means, then stds."""
    try:
        mean, std = (tuple(float(each) for each in side.split(",")) for side in text.split("/"))
    except ValueError as error:
        raise BastionError(f"--normalize {text}: expected MEAN,MEAN,MEAN/STD,STD,STD") from error
    return mean, std


def _read(path: Path) -> Any:
    if not storage.is_file(path):
        raise BastionError(f"import: no file {path}")
    if path.suffix == ".safetensors":
        return checkpoint.read_tensors(path)
    check_memory(_unpacked(path), torch.device("cpu"), f"import: {path}", "get a smaller one, or free some")
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        known = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds {known[1]}" if known else "it is no file of torch.save, or damaged"
        raise BastionError(
            f"import: {path} cannot be read as weights alone: {what}. Where it was made, store "
            "`torch.save(model.state_dict(), …)`, and import that"
        ) from error
    except Exception as error:  # torch raises all kinds of errors on a damaged file
        reason = shown(str(error).partition("\n")[0], quoted=False) or type(error).__name__
        raise BastionError(f"import: {path} is damaged or no file of torch.save ({reason}); get it again") from error


def _unpacked(path: Path) -> int:
    """Bytes of what is in a zip file, such as torch.save makes; of any other file its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return path.stat().st_size


def _contents(content: Any, path: Path, ema: bool) -> tuple[str, State]:
    """The entry of the file that holds the weights ("": the file itself), and its tensors by name."""
    if not isinstance(content, Mapping):
        raise BastionError(f"import: {path} holds a {type(content).__name__}, not named tensors")
    wanted = _AVERAGES if ema else _CONTAINERS
    for entry in wanted:
        inner = content.get(entry)
        if isinstance(inner, Mapping):
            return entry, _tensors(inner, f"{path}: {entry}")
    if ema:
        raise BastionError(f"import: {path} has no averaged weights; it has {', '.join(map(str, list(content)[:8]))}")
    return "", _tensors(content, str(path))


def _tensors(content: Mapping[str, Any], where: str) -> State:
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        what = f"{len(others)} entries are no tensors, such as '{others[0]}'" if others else "it is empty"
        raise BastionError(f"import: {where}: {what}; known places for weights are {', '.join(_CONTAINERS)}")
    for name, tensor in content.items():
        odd = _refused(tensor) if str(name).isprintable() else "is no name of a tensor; the file is damaged"
        if odd:
            raise BastionError(f"import: {where}: '{name}' {odd}")
    return {str(name): tensor for name, tensor in content.items()}


def _refused(tensor: Tensor) -> str:
    """Why a tensor cannot be loaded as weights; empty if it can."""
    if tensor.is_quantized:
        return "is quantised; import the weights from before, in floating point"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "is sparse or nested; store it with .to_dense()"
    if tensor.is_meta:
        return "has no numbers: it was saved on the meta device"
    if tensor.is_complex():
        return "holds complex numbers, which no model here has"
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        return "claims more numbers than the file holds"
    return ""


def _unwrapped(state: State, own: Mapping[str, Tensor]) -> tuple[State, Stats | None, list[str]]:
    """Strip the prefixes of wrappers, outermost first, and take out the normalisers between them."""
    stats: Stats | None = None
    stripped: list[str] = []
    while True:
        found = _stats_inside(state, own)
        if found:
            inner, names = found
            stats = inner if stats is None else _composed(stats, inner)
            state = {name: tensor for name, tensor in state.items() if name not in names}
        prefix = next((each for each in _PREFIXES if _all_below(each, state, own)), None)
        if prefix is None:
            return state, stats, stripped
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        stripped.append(prefix)


def _all_below(prefix: str, state: State, own: Mapping[str, Tensor]) -> bool:
    """Whether all tensors have this prefix, and it is not a part of the network itself."""
    ours = any(name.startswith(prefix) for name in own)
    return bool(state) and not ours and all(name.startswith(prefix) for name in state if name not in _MEANS + _STDS)


def _stats_inside(state: State, own: Mapping[str, Tensor]) -> tuple[Stats, tuple[str, str]] | None:
    pairs = zip(_MEANS, _STDS, strict=True)
    found = [(mean, std) for mean, std in pairs if mean in state and std in state and mean not in own]
    if len(found) > 1:
        raise BastionError(f"import: which of {' and '.join(mean for mean, _ in found)} comes first is not known")
    return next((((_numbers(state[mean]), _numbers(state[std])), (mean, std)) for mean, std in found), None)


def _composed(first: Stats, then: Stats) -> Stats:
    """Mean and std of the two normalisations one after the other."""
    (mean1, std1), (mean2, std2) = first, then
    if len(mean1) != len(mean2):
        raise BastionError(f"import: the file has two normalisers that do not go together, {first} and {then}")
    rows = [(m1 + s1 * m2, s1 * s2) for m1, s1, m2, s2 in zip(mean1, std1, mean2, std2, strict=True)]
    return tuple(mean for mean, _ in rows), tuple(std for _, std in rows)


def _numbers(tensor: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in tensor.flatten().tolist())


def _bare(name: str) -> str:
    """The name without the prefixes of wrappers."""
    return re.sub(rf"^({'|'.join(map(re.escape, _PREFIXES))})+", "", name)


def _renamed(state: State, backbone: Backbone) -> State:
    """The tensors under the model's names: by the family's renames, then by timm's filter for the network's module."""
    own = backbone.network.state_dict()
    if state.keys() <= own.keys():
        return state
    renamed = {}
    for name, tensor in state.items():
        new = name
        for pattern, to in backbone.renames:
            new = re.sub(f"^{pattern}$", to, new)
        if new in renamed:
            raise BastionError(f"import: two tensors of the file are '{new}' here, '{name}' is one of them")
        renamed[new] = tensor
    network: nn.Module = backbone.network
    by_timm: Callable[[State, nn.Module], State] | None = getattr(
        sys.modules[type(network).__module__], "checkpoint_filter_fn", None
    )
    if by_timm is None or renamed.keys() <= own.keys():
        return renamed
    try:
        filtered = by_timm(dict(renamed), network)
    except Exception:  # not a file of this family
        return renamed
    # timm also drops and resizes tensors silently. Keep the originals, so that they are reported.
    kept = {tensor.data_ptr() for tensor in filtered.values()}
    return filtered | {name: tensor for name, tensor in renamed.items() if tensor.data_ptr() not in kept}


def _in_order(state: State, own: Mapping[str, Tensor], path: Path) -> State:
    """The file's tensors under the model's names, in order. Old files lack BatchNorm's counters."""
    counts = any(name.endswith(_COUNTER) for name in state)
    theirs, ours = list(state), [name for name in own if counts or not name.endswith(_COUNTER)]
    for there, here in zip(theirs, ours, strict=False):
        if state[there].shape != own[here].shape:
            raise BastionError(
                f"import: {path} does not have the model's tensors in its order: '{there}' is "
                f"{tuple(state[there].shape)} there, where '{here}' is {tuple(own[here].shape)} here"
            )
    if len(theirs) != len(ours):
        raise BastionError(f"import: {path} has {len(theirs)} tensors, the model {len(ours)}; they cannot be matched")
    return {here: state[there] for there, here in zip(theirs, ours, strict=True)}


def _shaped(tensor: Tensor, shape: torch.Size | None) -> Tensor:
    """Reshaped, if the shapes differ only in axes of length 1."""
    if shape is None or [side for side in shape if side > 1] != [side for side in tensor.shape if side > 1]:
        return tensor
    return tensor.reshape(shape)


def _check(state: State, own: Mapping[str, Tensor], path: Path) -> None:
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    shapes = [name for name in own if name in state and own[name].shape != state[name].shape]
    if not (missing or unknown or shapes):
        return
    parts = [
        f"{len(names)} {what}: {listed}"
        for names, what, listed in (
            (missing, "that the model needs are missing", _some(missing)),
            (unknown, "are unknown to it", ", ".join(unknown)),  # all of them, however many
        )
        if names
    ]
    for name in shapes:
        parts.append(f"{name} is {tuple(state[name].shape)} there and {tuple(own[name].shape)} here")
    raise BastionError(
        f"import: {path} does not fit the model. Tensors: {'; '.join(parts)}.{_hint(state, own, shapes)}"
    )


def _check_numbers(state: State, own: Mapping[str, Tensor], path: Path) -> None:
    for name, tensor in state.items():
        if own[name].is_floating_point() and not tensor.is_floating_point():
            raise BastionError(f"import: {path}: '{name}' holds {tensor.dtype}; import weights in floating point")
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise BastionError(
                f"import: {path}: '{name}' holds NaN or infinity: the training diverged, or the file is damaged"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _hint(state: State, own: Mapping[str, Tensor], shapes: list[str]) -> str:
    heads = [name for name in shapes if own[name].ndim in (1, 2) and own[name].shape[1:] == state[name].shape[1:]]
    if shapes and heads == shapes:
        return f" Is it of {state[heads[0]].shape[0]} classes? Then: --set num_classes={state[heads[0]].shape[0]}"
    if shapes and all("pos_embed" in name for name in shapes):
        return " Position embeddings are of another image size: set img_size to the one it was trained at"
    return " Set the options of the model that it was made with (--set KEY=VALUE), or name another model"


def _normalisation(found: Stats | None, given: str | Stats | None, channels: int, path: Path) -> Stats:
    if isinstance(given, str):
        if given not in NORMALISATIONS:
            raise BastionError(f"import: unknown normalisation '{given}'{did_you_mean(given, NORMALISATIONS)}")
        given = NORMALISATIONS[given]
    if found is None and given is None:
        raise BastionError(
            f"import: {path} does not say how its model normalises pixels, and a wrong guess spoils every number; "
            f"give --normalize {' | '.join(NORMALISATIONS)} | MEAN,…/STD,…"
        )
    if found and given and found != given:
        raise BastionError(f"import: {path} has a normaliser of its own, mean and std {found}; leave --normalize out")
    mean, std = found or given or ((), ())
    if len(mean) != channels or len(std) != channels:
        raise BastionError(f"import: normalisation has {len(mean)} means and {len(std)} stds, the model {channels}")
    return mean, std
