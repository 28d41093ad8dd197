"""A paper's file says its tables; names, recipes and numbers follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bastion import BastionError
from bastion.papers import Paper

TEXT = """
cite: A and B 2022
common: {about: on digits, seed: 1}
axes:
  model:
    small: {about: Small, model: {name: net, depth: 2}, with: {weights: s.pt}}
    large: {about: Large, model: {name: net, depth: 9}, with: {weights: l.pt}}
  objective:
    default: {about: robust}
    standard: {about: plain}
tables:
  Table 1:
    axes: {model: [small, large], objective: [default, standard]}
    without: [large-s*]
    rows: {small small-*: {batch: 4, first: get $weights}}
  Fig. 2:
    axes: {model: small, study: wd, decay: ['0', '1e-3']}
    common: {about: decay $decay, optimizer: {weight_decay: $decay}, init: {from: weights/$weights-$model}}
  Fig. 3:
    axes: {kind: {odd: {seed: 3}, 7: {seed: 7}}}
"""
NUMBERS = "name,clean,pgd,hours,source,note\nsmall,0.5,0.25,,Table 1,of dense steps\nlarge,0.75,,3,Table 1,\n"


@pytest.fixture
def paper(tmp_path: Path) -> Paper:
    (tmp_path / "ab.yaml").write_text(TEXT)
    (tmp_path / "ab.csv").write_text(NUMBERS)
    return Paper(tmp_path / "ab.yaml")


def test_names_join_the_words_of_each_combination(paper: Paper) -> None:
    assert [*paper.rows] == ["small", "small-standard", "large", "small-wd-0", "small-wd-1e-3", "odd", "7"]


def test_a_row_is_its_parts_one_over_the_other(paper: Paper) -> None:
    assert [*paper.rows["small-standard"].contents] == [
        {"seed": 1},
        {},
        {"model": {"name": "net", "depth": 2}},
        {},
        {"batch": 4},
    ]
    assert [*paper.rows["7"].contents] == [{"seed": 1}, {}, {"seed": 7}]


def test_words_are_filled_in_and_are_numbers_where_they_stand_alone(paper: Paper) -> None:
    common = [*paper.rows["small-wd-1e-3"].contents][1]
    assert common == {"optimizer": {"weight_decay": 1e-3}, "init": {"from": "weights/s.pt-small"}}


def test_a_row_tells_its_words_first_then_what_it_shares(paper: Paper) -> None:
    assert paper.rows["small-wd-0"].about == "Small, decay 0, on digits."
    assert paper.rows["small"].about == "Small, robust, on digits."
    assert paper.rows["small"].first == ["get s.pt"]
    assert paper.rows["large"].first == []


def test_published_numbers_are_of_their_row(paper: Paper) -> None:
    assert paper.expected("small") == {
        "clean": 0.5,
        "pgd": 0.25,
        "source": "Table 1 of A and B 2022",
        "note": "of dense steps",
    }
    assert paper.expected("large") == {"clean": 0.75, "hours": 3, "source": "Table 1 of A and B 2022"}
    assert paper.expected("odd") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[small, large]", "[small, huge]", "axes.model: has no word 'huge'"),
        ("axes: {kind: {odd:", "axes: {kind: {large:", "Fig. 3: 'large' is in another table already"),
        ("decay $decay", "decay $wd", "small-wd-0: no axis or value for 'wd' in 'decay .wd'"),
    ],
)
def test_slips_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    (tmp_path / "ab.yaml").write_text(TEXT.replace(old, new))
    with pytest.raises(BastionError, match=message):
        [row.about for row in Paper(tmp_path / "ab.yaml").rows.values()]
