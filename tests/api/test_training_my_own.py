"""Training what somebody has: a network and data of their own, an objective by name or as an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from vit_pytorch import ViT

import bastion
from bastion.attacks import PGD
from bastion.models.corruption_model import load_corruption_model
from bastion.probes import Accuracy
from bastion.training.objectives import Trades


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    """Bright and dark pictures: a network learns to tell them apart in a few steps."""
    y = torch.arange(40) % 2
    x = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)) / 2
    return x + y.view(-1, 1, 1, 1) / 2, y


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_train_my_module_on_my_data_set(images: tuple[Tensor, Tensor]) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = bastion.train(model=model, data=TensorDataset(*images), objective="trades", epochs=2)
    assert run.folder.parent == Path("runs") and run.folder.name.startswith("sequential-")
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = bastion.load(run.folder, network=net())
    assert torch.equal(again(images[0]), model.eval()(images[0]))
    with pytest.raises(bastion.BastionError, match=r"a network of your own \(Sequential\)"):
        bastion.load(run.folder)
    assert bastion.train(model=net(), data=images, objective="trades", epochs=2, resume=True) == run


class Spy(nn.Module):
    """Keeps the images that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.seen = nn.Linear(3 * 8 * 8, 2), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(x.detach().clone())
        logits: Tensor = self.head(x.flatten(1))
        return logits


def test_my_images_are_trained_on_as_they_are_unless_i_say_otherwise(images: tuple[Tensor, Tensor]) -> None:
    """Not cropped, not mirrored, and floats are not rounded to bytes."""
    plain, mirrored = Spy(), Spy()
    run = bastion.train(model=plain, data=images, epochs=1)
    assert run.recipe()["augment"]["crop"] == "none"
    bastion.train(model=mirrored, data=images, epochs=1, changes={"augment.hflip": 1}, folder="mirrored")
    given = {tuple(x.flatten().tolist()) for x in images[0]}
    seen = [torch.cat(each.seen) for each in (plain, mirrored)]
    assert {tuple(x.flatten().tolist()) for x in seen[0]} < given
    assert {tuple(x.flatten().tolist()) for x in seen[1].flip(3)} < given


def test_objects_are_taken_wherever_a_name_is(images: tuple[Tensor, Tensor]) -> None:
    model = ViT(image_size=8, patch_size=4, num_classes=2, dim=8, depth=1, heads=1, mlp_dim=8)
    attack = PGD(steps=1, loss="kl", keep="last")
    changes = {"optimizer.lr": 0.01, "validate.attack": PGD(steps=1), "batch": 8}
    run = bastion.train(model=model, data=images, objective=Trades(attack=attack), epochs=1, changes=changes)
    assert run.recipe()["objective"]["attack"] == {"name": "pgd", "steps": 1, "loss": "kl", "keep": "last"}
    assert "val_robust" in run.history()[-1]
    suite = {
        "probes": {"clean": Accuracy(), "pgd": {"name": "adversarial", "threat": {"norm": "linf", "eps": "8/255"}}}
    }
    suite["probes"]["pgd"]["attack"] = attack  # type: ignore[index]
    facts = bastion.measure(model, images, suite, changes={"probes.pgd.threat.eps": "4/255"})
    assert list(facts.accuracies()) == ["clean", "pgd"] and "ℓ∞ ≤ 4/255" in facts.table()


def test_what_is_missing_is_said_in_a_line(images: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(bastion.BastionError, match=r"give the name of a recipe .* or model=… and data=…"):
        bastion.train(epochs=1)
    with pytest.raises(bastion.BastionError, match="give a network as model=…"):
        bastion.train(net(), data=images)  # type: ignore[arg-type]
    with pytest.raises(bastion.BastionError, match="labels must be from 0 to 1, the model's classes"):
        bastion.train(model=net(), data=(images[0], images[1] + 1))


def test_my_own_vision_transformer_trains_rspc(images: tuple[Tensor, Tensor]) -> None:
    vit = ViT(image_size=8, patch_size=4, num_classes=2, dim=8, depth=2, heads=2, mlp_dim=8)
    settings: dict[str, Any] = {"normalize": "none", "shape": (3, 8, 8), "blocks": "transformer.layers.*.0"}
    blind = bastion.wrap(vit, **settings)
    with pytest.raises(bastion.BastionError, match="this model has none; take another model"):
        bastion.train(model=blind, data=images, objective="rspc", epochs=1)
    with pytest.raises(bastion.BastionError, match="unknown 'token'; did you mean 'tokens'"):
        bastion.wrap(vit, attention="token", **settings)
    model = bastion.wrap(vit, attention="tokens", **settings)
    run = bastion.train(model=model, data=images, objective="rspc", epochs=1)
    steps = [record for record in run.history() if record["kind"] == "step"]
    assert all(record["alignment"] > 0 for record in steps)
    assert load_corruption_model(run.folder).grid.size == 4
