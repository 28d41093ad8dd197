"""Checkpoints of other code bases, in the layouts that they are published in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from bastion import BastionError
from bastion.cli import app
from bastion.models import checkpoint, models
from bastion.models.import_checkpoint import NORMALISATIONS, import_file
from bastion.models.load import load
from bastion.models.meta import meta

VIT = {"name": "timm/vit_tiny_patch16_224", "img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2}
SPEC = {**VIT, "num_heads": 2, "num_classes": 5}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return models.build(SPEC).network.state_dict()


def _stats() -> dict[str, Tensor]:
    return {"normalize.mean": torch.tensor(MEAN).view(1, 3, 1, 1), "normalize.std": torch.tensor(STD).view(1, 3, 1, 1)}


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


LAYOUTS = {
    "flat": lambda state: state,
    "training file": lambda state: {"model": state, "epoch": 3, "optimizer": {"lr": 0.1}},
    "timm saver": lambda state: {"state_dict": state, "arch": "x", "args": argparse.Namespace(lr=0.1), "epoch": 7},
    "training file with numpy's numbers": lambda state: {"net": state, "acc": np.float64(93.2), "step": np.int64(7)},
    "data parallel": lambda state: {"model_state_dict": _below("module.", state)},
    "attack wrapper": lambda state: _below("module.base_model.", state),
    "compiled": lambda state: _below("_orig_mod.", state),
    "normaliser": lambda state: {**_stats(), **_below("model.", state)},
    "attack wrapper and normaliser": lambda state: _below(
        "module.base_model.", {**_stats(), **_below("model.", state)}
    ),
    "sequence with a normaliser": lambda state: {
        **{name.replace("normalize", "0"): tensor for name, tensor in _stats().items()},
        **_below("1.module.", state),
    },
    "average of training": lambda state: {"n_averaged": torch.tensor(3), **_below("module.", state)},
    "attacker": lambda state: _below("module.", {**_below("model.", state), "attacker.eps": torch.tensor(1.0)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(layout: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(LAYOUTS[layout](weights), path)
    found = "normaliser" in layout
    done = import_file(path, SPEC, normalize=None if found else "imagenet")
    assert done.model.network.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in done.model.network.state_dict().items())
    mean, std = (MEAN, STD) if found else NORMALISATIONS["imagenet"]
    assert torch.allclose(done.model.mean.flatten(), torch.tensor(mean))
    assert torch.allclose(done.model.std.flatten(), torch.tensor(std))
    left_out = {"attacker": ["module.attacker.eps"], "average of training": ["n_averaged"]}
    assert done.left_out == left_out.get(layout, [])


def test_the_average_is_taken_only_if_asked_for(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "full.pth"
    average = {name: tensor + 1 for name, tensor in weights.items()}
    torch.save({"state_dict": weights, "state_dict_ema": average}, path)
    plain, averaged = (import_file(path, SPEC, ema=ema, normalize="none").model.network for ema in (False, True))
    assert torch.equal(plain.state_dict()["norm.bias"], weights["norm.bias"])
    assert torch.equal(averaged.state_dict()["norm.bias"], weights["norm.bias"] + 1)
    torch.save(weights, path)
    with pytest.raises(BastionError, match="has no averaged weights; it has cls_token, pos_embed"):
        import_file(path, SPEC, ema=True, normalize="none")


def _save(state: Any, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_every_tensor_is_used_or_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    _save({**weights, "head_dist.weight": torch.zeros(2)}, path)
    with pytest.raises(BastionError, match=r"1 are unknown to it: head_dist.weight\."):
        import_file(path, SPEC, normalize="none")
    _save({name: tensor for name, tensor in weights.items() if name != "norm.bias"}, path)
    with pytest.raises(BastionError, match=r"1 that the model needs are missing: norm.bias\."):
        import_file(path, SPEC, normalize="none")
    _save(weights, path)
    with pytest.raises(BastionError, match=r"head.weight is \(5, 24\) there and \(1000, 24\) here.*num_classes=5"):
        import_file(path, {**SPEC, "num_classes": 1000}, normalize="none")
    with pytest.raises(BastionError, match="set img_size to the one it was trained at"):
        import_file(path, {**SPEC, "img_size": 64}, normalize="none")


def test_normalisation_is_never_guessed(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = _save(weights, tmp_path / "plain.pth")
    with pytest.raises(BastionError, match="does not say how its model normalises pixels.*--normalize none | half"):
        import_file(path, SPEC)
    with pytest.raises(BastionError, match="unknown normalisation 'imagnet'; did you mean 'imagenet'"):
        import_file(path, SPEC, normalize="imagnet")
    _save({**_stats(), **_below("model.", weights)}, path)
    with pytest.raises(BastionError, match="has a normaliser of its own.*leave --normalize out"):
        import_file(path, SPEC, normalize="imagenet")


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the file was run",)


def test_no_code_of_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _save({"state_dict": Malicious()}, tmp_path / "bad.pth")
    with pytest.raises(
        BastionError, match=r"cannot be read as weights alone: it holds .*print.*torch.save\(model.state"
    ):
        import_file(path, SPEC, normalize="none")
    assert "was run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "damaged|no file of torch.save"), (b"PK\x03\x04 cut off", "damaged"), (b"not a checkpoint", "no file of")],
)
def test_damaged_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pth"
    path.write_bytes(content)
    with pytest.raises(BastionError, match=message):
        import_file(path, SPEC, normalize="none")


def test_a_file_without_named_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="holds a list, not named tensors"):
        import_file(_save([torch.zeros(1)], tmp_path / "list.pth"), SPEC, normalize="none")
    with pytest.raises(BastionError, match="1 entries are no tensors, such as 'epoch'; known places"):
        import_file(_save({"epoch": 3}, tmp_path / "odd.pth"), SPEC, normalize="none")


def test_counters_of_old_batch_norms_are_filled(tmp_path: Path) -> None:
    network = models.build("resnet/micro").network
    state = {name: tensor for name, tensor in network.state_dict().items() if "num_batches" not in name}
    done = import_file(_save(state, tmp_path / "old.pth"), {"name": "resnet/micro"}, normalize="cifar10")
    assert len(done.filled) == sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_names_of_facebooks_convnext_become_timms(tmp_path: Path) -> None:
    spec = {
        "name": "timm/convnext_atto",
        "num_classes": 3,
        "depths": (1, 1, 1, 1),
        "dims": (4, 8, 8, 8),
        "conv_mlp": False,
    }
    network = models.build(spec).network
    theirs = {}
    for name, tensor in network.state_dict().items():
        if name.startswith("stem."):
            name = f"downsample_layers.0.{name.removeprefix('stem.')}"
        parts = name.split(".")
        if "downsample" in parts:
            name = f"downsample_layers.{parts[1]}.{'.'.join(parts[3:])}"
        name = name.replace(".blocks.", ".").replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv")
        name = name.replace("head.norm", "norm").replace("head.fc", "head")
        theirs[name] = tensor
    done = import_file(_save({"model": theirs}, tmp_path / "fb.pth"), spec, normalize="imagenet")
    assert all(
        torch.equal(tensor, network.state_dict()[name]) for name, tensor in done.model.network.state_dict().items()
    )


def test_a_resnet_of_the_reference_implementation_answers_as_there(tmp_path: Path) -> None:
    """The standard model of the attack's authors: weights, names and network are theirs."""
    resnet = pytest.importorskip("pyautoattack.examples.resnet")
    path = Path(resnet.__file__).parent / "model_test.pt"
    theirs = resnet.ResNet18().eval()
    theirs.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    ours = import_file(path, {"name": "cifar/resnet18"}, normalize="none").model
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), atol=1e-4)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            "cifar/preact-resnet18",
            {"stem": "conv1", "stages.0.": "layer1.", "stages.3.": "layer4.", "skip": "shortcut.0"},
        ),
        ("cifar/wrn-28-10", {"stem": "conv1", "stages.0.": "block1.layer.", "skip": "convShortcut", "head": "fc"}),
    ],
)
def test_names_of_the_usual_cifar_code_are_known(model: str, names: dict[str, str], tmp_path: Path) -> None:
    from bastion.models.import_checkpoint import _renamed

    with meta():
        backbone = models.build(model)
    own = backbone.network.state_dict()
    theirs = {}
    for name, tensor in own.items():
        other = name
        for ours, written in {"stages.1.": "layer2.", "stages.2.": "layer3.", "head": "linear", **names}.items():
            other = other.replace(ours, written)
        other = other.replace("norm.", "bn1." if "wrn" in model else "bn.").replace("norm", "bn")
        theirs[other] = tensor
    assert len(theirs) == len(own) and not theirs.keys() & own.keys()
    assert _renamed(theirs, backbone).keys() == own.keys()


def test_the_command_makes_a_model_that_loads(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = _save({**_stats(), **_below("model.", weights)}, tmp_path / "published.pth")
    options = [f"--set={key}={value}" for key, value in SPEC.items() if key != "name"]
    command = ["import", str(path), "--model", str(SPEC["name"]), "-o", str(tmp_path / "mine"), *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0 and "without the prefix model." in result.output
    model = load(tmp_path / "mine")
    x = torch.rand(2, 3, 32, 32)
    network = models.build(SPEC).network.eval()
    network.load_state_dict(weights)
    wanted = network((x - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1))
    assert torch.allclose(model(x), wanted, atol=1e-5)
    assert checkpoint.read_card(tmp_path / "mine").about["imported"]["file"] == "published.pth"
    with pytest.raises(BastionError, match="has a model already"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def _other_names(state: dict[str, Tensor], *, counters: bool = True) -> dict[str, Tensor]:
    kept = [(name, tensor) for name, tensor in state.items() if counters or not name.endswith("num_batches_tracked")]
    return {f"_{number}.{name.rpartition('.')[2]}": tensor for number, (name, tensor) in enumerate(kept)}


@pytest.mark.parametrize("counters", [True, False])
def test_tensors_of_other_names_are_matched_by_order_if_asked_for(counters: bool, tmp_path: Path) -> None:
    path, spec = tmp_path / "weights.pth", {"name": "timm/tf_efficientnet_lite0", "num_classes": 5}
    torch.manual_seed(3)
    network = models.build(spec).network
    torch.save(_other_names(network.state_dict(), counters=counters), path)
    with pytest.raises(BastionError, match="that the model needs are missing"):
        import_file(path, spec, normalize="half")
    done = import_file(path, spec, normalize="half", match="order")
    assert "matched by order and shape, not by name: check its clean accuracy" in str(done)
    assert done.about(path)["imported"]["match"] == "order"
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(done.model(x), network.eval()((x - 0.5) / 0.5))


def test_tensors_in_another_order_are_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    reordered = _other_names(dict(reversed(weights.items())))
    torch.save(reordered, path)
    with pytest.raises(
        BastionError, match=r"not have the model's tensors in its order: '_0.bias' is \(5,\) there, where"
    ):
        import_file(path, SPEC, normalize="half", match="order")
    torch.save(_other_names(dict(list(weights.items())[:-1])), path)
    with pytest.raises(BastionError, match=r"has \d+ tensors, the model \d+; they cannot be matched"):
        import_file(path, SPEC, normalize="half", match="order")
    with pytest.raises(BastionError, match="import: --match is name or order, got 'shape'"):
        import_file(path, SPEC, normalize="half", match="shape")


def test_a_normaliser_inside_another_is_not_lost(weights: dict[str, Tensor], tmp_path: Path) -> None:
    half = {"normalize.mean": torch.full((3,), 0.5), "normalize.std": torch.full((3,), 0.25)}
    path = _save({**_stats(), **_below("model.", {**half, **_below("model.", weights)})}, tmp_path / "twice.pth")
    model = import_file(path, SPEC).model
    x = torch.rand(1, 3, 4, 4)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, STD))
    assert torch.allclose((x - model.mean) / model.std, ((x - mean) / std - 0.5) / 0.25, atol=1e-4)
    _save({**_stats(), "mean": torch.zeros(3), "std": torch.ones(3), **_below("model.", weights)}, path)
    with pytest.raises(BastionError, match="which of normalize.mean and mean comes first is not known"):
        import_file(path, SPEC)


def test_what_timm_would_drop_or_resize_is_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    extra = {"pre_logits.fc.weight": torch.zeros(24, 24), "pre_logits.fc.bias": torch.zeros(24)}
    path = _save({**weights, **extra}, tmp_path / "representation.pth")
    with pytest.raises(BastionError, match=r"2 are unknown to it: pre_logits.fc.weight, pre_logits.fc.bias\."):
        import_file(path, SPEC, normalize="none")
    with pytest.raises(BastionError, match=r"pos_embed is \(1, 17, 24\) there and \(1, 65, 24\) here"):
        import_file(path, {**SPEC, "img_size": 64}, normalize="none")


def test_each_unknown_tensor_is_named_however_many(weights: dict[str, Tensor], tmp_path: Path) -> None:
    extra = {f"other.{index}": torch.zeros(1) for index in range(20)}
    with pytest.raises(BastionError) as told:
        import_file(_save({**weights, **extra}, tmp_path / "more.pth"), SPEC, normalize="none")
    assert all(name in str(told.value) for name in extra)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    spec = {"name": "convnext-iso/s", "num_classes": 2}
    state = {"blocks.0.conv_dw.bias": torch.zeros(384), "blocks.0.dwconv.bias": torch.ones(384)}
    with pytest.raises(BastionError, match="two tensors of the file are 'blocks.0.conv_dw.bias' here"):
        import_file(_save(state, tmp_path / "both.pth"), spec, normalize="none")


def test_options_that_make_no_network_are_told(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = _save(weights, tmp_path / "plain.pth")
    with pytest.raises(BastionError, match="cannot be built: dim should be divisible by num_heads"):
        import_file(path, {"name": "vit/micro", "num_heads": 3}, normalize="none")


def test_the_unused_stage_of_trades_wide_resnets_is_left_out(tmp_path: Path) -> None:
    network = models.build("resnet/micro").network
    unused = {"module.sub_block1.layer.0.conv1.weight": torch.zeros(4)}
    path = _save({**_below("module.", network.state_dict()), **unused}, tmp_path / "trades.pt")
    assert import_file(path, {"name": "resnet/micro"}, normalize="none").left_out == list(unused)


SMALL = {"name": "resnet/micro", "widths": [4, 8], "depths": [1, 1]}


@pytest.fixture(scope="module")
def small() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return models.build(SMALL).network.state_dict()


@pytest.mark.filterwarnings("ignore")  # torch's, when such tensors are made
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight.to_sparse(), "is sparse or nested; store it with .to_dense"),
        (lambda weight: weight.to_sparse_csr(), "is sparse or nested"),
        (lambda weight: torch.nested.nested_tensor([weight, weight[:2]]), "is sparse or nested"),
        (
            lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
            "is quantised; import the weights from",
        ),
        (lambda weight: weight.to(torch.int8), "holds torch.int8; import weights in floating point"),
        (lambda weight: weight.to("meta"), "has no numbers: it was saved on the meta device"),
        (lambda weight: weight.to(torch.complex64), "holds complex numbers"),
        (lambda weight: weight * torch.nan, "holds NaN or infinity: the training diverged"),
        (lambda weight: weight / 0, "holds NaN or infinity: the training diverged"),
        (lambda weight: torch.zeros(1).expand(10**13), "claims more numbers than the file holds"),
    ],
)
def test_what_is_no_weight_is_refused_in_one_line(
    small: dict[str, Tensor], tmp_path: Path, change: Any, message: str
) -> None:
    path = _save({**small, "head.weight": change(small["head.weight"])}, tmp_path / "odd.pth")
    with pytest.raises(BastionError, match=f"'head.weight' {message}") as told:
        import_file(path, SMALL, normalize="none")
    assert "\n" not in str(told.value)


def test_a_normaliser_of_nan_is_refused(small: dict[str, Tensor], tmp_path: Path) -> None:
    stats = {"mean": torch.zeros(3), "std": torch.full((3,), torch.nan)}
    path = _save({**stats, **_below("model.", small)}, tmp_path / "nan.pth")
    with pytest.raises(BastionError, match="need 3 means and 3 positive stds"):
        import_file(path, SMALL)


def test_names_with_escape_sequences_are_refused_and_not_printed(small: dict[str, Tensor], tmp_path: Path) -> None:
    path = _save({**small, "\x1b[31mred": torch.zeros(1)}, tmp_path / "escape.pth")
    with pytest.raises(BastionError, match="'�.31mred' is no name of a tensor; the file is damaged"):
        import_file(path, SMALL, normalize="none")


def _mutated(content: bytes, generator: np.random.Generator) -> bytes:
    kind = generator.integers(4)
    if kind == 0:  # cut off
        return content[: generator.integers(len(content))]
    changed = bytearray(content)
    start = int(generator.integers(len(content)))
    if kind == 1:  # a part from elsewhere
        source = int(generator.integers(len(content)))
        changed[start : start + 16] = content[source : source + 16]
    for place in generator.integers(len(content), size=generator.integers(1, 9)) if kind == 2 else ():
        changed[place] ^= 1 << generator.integers(8)
    if kind == 3:  # in the head, where names and types stand
        changed[start % 1500] = generator.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("layout", ["zip", "old", "safetensors"])
def test_mutated_files_are_imported_or_refused_and_nothing_else(
    layout: str, small: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / ("w.safetensors" if layout == "safetensors" else "w.pth")
    if layout == "safetensors":
        save_file(small, path)
    else:
        torch.save({"state_dict": small, "epoch": 3}, path, _use_new_zipfile_serialization=layout == "zip")
    content = path.read_bytes()
    refused: list[str] = []
    for seed in range(100):
        path.write_bytes(_mutated(content, np.random.default_rng(seed)))
        try:
            import_file(path, SMALL, normalize="none")
        except BastionError as error:
            refused.append(str(error))
    assert len(refused) > 40
    assert all(message.isprintable() for message in refused)
