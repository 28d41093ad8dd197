from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bastion.data.split import train_val_split


@given(st.lists(st.integers(0, 4), max_size=300))
def test_every_image_is_in_one_part_and_every_class_in_both(values: list[int]) -> None:
    labels = torch.tensor(values, dtype=torch.long)
    train, val = train_val_split(labels)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(len(values)))
    assert train.tolist() == sorted(train.tolist())
    assert val.tolist() == sorted(val.tolist())
    for label in set(values):
        total = values.count(label)
        held = int((labels[val] == label).sum())
        assert held == (0 if total == 1 else -(-total // 10))


def test_a_class_gives_at_most_a_hundred() -> None:
    train, val = train_val_split(torch.arange(10).repeat(2000))
    assert len(val) == 1000
    assert torch.bincount(val % 10).tolist() == [100] * 10
    assert len(train) == 19000


def test_the_split_never_changes() -> None:
    """Numbers measured with one version are compared with those of another: these positions are for ever."""
    _, val = train_val_split(torch.arange(2).repeat(20))
    assert val.tolist() == [1, 5, 14, 20]


def test_a_class_is_split_the_same_whatever_other_classes_there_are() -> None:
    labels = torch.arange(3).repeat(50)
    _, val = train_val_split(labels)
    alone = (labels == 1).nonzero().flatten()
    _, val_alone = train_val_split(labels[alone])
    assert alone[val_alone].tolist() == [position for position in val.tolist() if position % 3 == 1]
