"""A model of many classes, measured on some of them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bastion import measure
from bastion.acceleration import accelerate
from bastion.attacks import Threat, attacks
from bastion.attacks.judge import judge
from bastion.errors import BastionError
from bastion.models import Backbone, Classifier, checkpoint, models
from bastion.models.columns import ChosenClasses, with_columns
from bastion.types import DataSet, Tapped

COLUMNS = (4, 0, 2)


@pytest.fixture
def five_classes(tiny_model: Classifier) -> Classifier:
    """`tiny_model` with its three classes at COLUMNS of five; the other two beat them at every image."""
    head = tiny_model.network[-1]
    wide = nn.Linear(8, 5)
    with torch.no_grad():
        wide.weight.zero_()
        wide.bias.fill_(100.0)
        wide.weight[list(COLUMNS)], wide.bias[list(COLUMNS)] = head.weight, head.bias
    network = copy.deepcopy(tiny_model.network)
    network[-1] = wide
    return Classifier(Backbone(network, 5, (3, 8, 8)), (0.4, 0.4, 0.4), (0.2, 0.2, 0.2)).eval()


@pytest.fixture
def chosen(tiny_data: DataSet) -> DataSet:
    return replace(tiny_data, columns=COLUMNS)


def test_predictions_and_attacks_see_the_chosen_classes_alone(
    five_classes: Classifier, tiny_model: Classifier, chosen: DataSet
) -> None:
    batch, threat = chosen.test.batch(range(40)), Threat("linf", 16 / 255)
    some = with_columns(five_classes, chosen)
    assert torch.allclose(some(batch.x), tiny_model.eval()(batch.x), atol=1e-5)
    for name in ("pgd", "apgd-t", "square"):
        attack = attacks.build({"name": name, **({"steps": 20} if name != "square" else {"queries": 200})})
        ours, theirs = (judge(accelerate(each), batch, attack, threat, seed=0) for each in (some, tiny_model))
        assert torch.equal(ours.fooled, theirs.fooled)


def test_measuring_is_that_of_a_model_of_these_classes(
    five_classes: Classifier, tiny_model: Classifier, chosen: DataSet, tmp_path: Path
) -> None:
    ours = measure(five_classes, chosen, "demo", limit=40, folder=tmp_path / "ours")
    theirs = measure(tiny_model.eval(), replace(chosen, columns=None), "demo", limit=40, folder=tmp_path / "theirs")
    for label in ("clean", "pgd-20"):
        assert (ours.columns[f"{label}/correct"] == theirs.columns[f"{label}/correct"]).all()


def test_facts_of_other_columns_are_others(five_classes: Classifier, chosen: DataSet, tmp_path: Path) -> None:
    suite = {"probes": {"clean": "accuracy"}, "studies": {"cost": "complexity"}}
    for columns in (COLUMNS, (0, 2, 4), COLUMNS):
        measure(five_classes, replace(chosen, columns=columns), suite, limit=8, folder=tmp_path)
    assert len(list((tmp_path / "facts").iterdir())) == 2


@pytest.mark.processes
def test_workers_measure_the_same(five_classes: Classifier, chosen: DataSet, tmp_path: Path) -> None:
    suite = {"probes": {"clean": "accuracy"}}
    one, two = (
        measure(five_classes, chosen, suite, limit=16, batch_size=8, workers=n, folder=tmp_path / str(n))
        for n in (1, 2)
    )
    assert (one.columns["clean/prediction"] == two.columns["clean/prediction"]).all()


def test_a_model_of_these_classes_stays_as_it_is(tiny_model: Classifier, chosen: DataSet) -> None:
    assert with_columns(tiny_model, chosen) is tiny_model  # three outputs, but column 4: made for the folder
    assert with_columns(tiny_model, replace(chosen, columns=(0, 1, 2))) is tiny_model
    assert with_columns(tiny_model, replace(chosen, columns=None)) is tiny_model


def test_another_order_of_all_classes_is_put_right(tiny_model: Classifier, chosen: DataSet) -> None:
    x = chosen.test.batch(range(4)).x
    turned = with_columns(tiny_model.eval(), replace(chosen, columns=(2, 0, 1)))
    assert torch.equal(turned(x), tiny_model(x)[:, [2, 0, 1]])


def test_a_network_of_the_users_own_is_cut_too(five_classes: Classifier, chosen: DataSet) -> None:
    x = chosen.test.batch(range(4)).x
    network = nn.Sequential(five_classes.network)
    assert torch.equal(with_columns(network, chosen)(x), network(x)[:, list(COLUMNS)])


def test_columns_beyond_the_models_classes_are_told(
    five_classes: Classifier, tiny_data: DataSet, tmp_path: Path
) -> None:
    beyond = replace(tiny_data, columns=(0, 1, 7))
    message = "the class map of tiny names output 7, but the model has 5, from 0 to 4"
    for model in (five_classes, nn.Sequential(five_classes.network)):
        with pytest.raises(BastionError, match=message):
            measure(model, beyond, "demo", folder=tmp_path)
    with pytest.raises(
        BastionError, match=r"has 5 classes, tiny has 3; say which of the model's they are \(`class_map"
    ):
        measure(five_classes, tiny_data, "demo", folder=tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((0, 1), "columns must be 3 numbers from 0, one of each class, got 2"),
        ((0, 1, -1), "columns must be 3 numbers from 0, one of each class, got 3, the least -1"),
        ((0, 1, 0), "classes red and blue are both column 0; each needs its own"),
    ],
)
def test_a_data_set_has_one_column_of_each_class(columns: tuple[int, ...], message: str, tiny_data: DataSet) -> None:
    with pytest.raises(BastionError, match=f"data set 'tiny': {message}"):
        replace(tiny_data, columns=columns)


def test_what_else_the_model_has_is_reached_and_copies_are_whole() -> None:
    backbone = models.build({"name": "vit/micro", "embed_dim": 16, "depth": 1, "num_heads": 2})
    whole = Classifier(backbone, (0.5,) * 3, (0.5,) * 3).eval()
    some, x = ChosenClasses(whole, (3, 1)), torch.rand(2, *whole.shape)
    assert isinstance(some, Tapped)
    assert some.num_classes == 2
    with some.tap("blocks") as taps:
        logits = some(x)
    assert list(taps.blocks) == [block.name for block in whole.blocks()]
    for copied in (copy.deepcopy(some), pickle.loads(pickle.dumps(some))):
        assert isinstance(copied, ChosenClasses)
        assert torch.equal(copied(x), logits)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        some.nothing  # noqa: B018


def test_sources_of_transfer_are_cut_alike(five_classes: Classifier, chosen: DataSet, tmp_path: Path) -> None:
    """Labels are those of the chosen classes: a source of all classes would be attacked for wrong ones."""
    spec = {"name": "vit/micro", "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5, "img_size": 8}
    torch.manual_seed(0)
    source = Classifier(models.build(spec), (0.4,) * 3, (0.2,) * 3, spec=spec)
    checkpoint.save(source, tmp_path / "source", {})
    probe = {"name": "transfer", "source": str(tmp_path / "source"), "threat": {"norm": "linf", "eps": 0.1}}
    suite = {"probes": {"transfer": {**probe, "attack": "pgd"}}}
    facts = measure(five_classes, chosen, suite, limit=8, folder=tmp_path / "run")
    assert set(facts.columns["transfer/prediction"].tolist()) <= {0, 1, 2}
