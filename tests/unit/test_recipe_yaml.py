"""YAML is read as one expects it, and what is not valid is refused in one line, soon."""

from __future__ import annotations

import pytest

from bastion import BastionError
from bastion.recipe_yaml import read, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        ("1e-3", 1e-3),
        ("-2E+4", -2e4),
        ("1.5e2", 150.0),
        (".5/2", 0.25),
        ("1e-3/2", 5e-4),
        ("12", 12),
        ("010", 10),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", None),
        ("1/2/3", "1/2/3"),
        ("a/b", "a/b"),
        ("1:30", "1:30"),
        ("0x_", "0x_"),
        ("2020-13-45", "2020-13-45"),
        ("timm/vit_tiny_patch16_224", "timm/vit_tiny_patch16_224"),
        ("'8/255'", "8/255"),
        ("rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5-inc1"),
        ("{a: [1, x]}", {"a": [1, "x"]}),
    ],
)
def test_fractions_and_exponents_are_numbers_and_words_are_words(text: str, value: object) -> None:
    found = read_value(text, "here")
    assert found == value and type(found) is type(value)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "here: not valid YAML"),
        ("- a", "here: expected keys and values, got list"),
        ("a: 1\nb: 2\na: 3", "the key 'a' is given twice"),
        ("{[a]: 1}", "a key must be a word or a number"),
        ("a: 1/0", "1/0 divides by zero"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: !!int x", "'x' is not a valid int"),
        ("a: !!bool maybe", "'maybe' is not a valid bool"),
        ("a: !fraction 1", "'1' is not a valid !fraction"),
        (f"a: {'9' * 5000}", "'9{40}' is not a valid int"),
        ("a: !!timestamp 2020-01-01", "could not determine a constructor"),
        ("a: !!map 3", "expected a mapping node"),
        ("a: &a [*a]", "an alias is inside what it repeats"),
        (BOMB, "more than 10,000 values; does an alias repeat what has aliases"),
        ("".join(f"k{number}: 1\n" for number in range(40_000)), "more than 10,000 values"),
        (f"a: {'x' * 10**6}", "here: has 1,000,003 characters; a file of settings may have 1,000,000"),
        (f"a: {'[' * 60}{']' * 60}", "lists or sections more than 50 deep in each other"),
        (f"a: {2**63}", "'9223372036854775808' is not a valid int"),
        ("a: " + "[" * 5000, "maximum recursion depth"),
        ("a: \0", "special characters are not allowed"),
    ],
)
def test_bad_yaml_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(BastionError, match=message) as caught:
        read(text, "here")
    assert "\n" not in str(caught.value)


def test_a_value_is_on_one_line() -> None:
    with pytest.raises(BastionError, match="here: a value must be on one line"):
        read_value("1\nseed: 2", "here")


def test_a_value_may_be_repeated_by_an_alias() -> None:
    assert read("a: &a {b: 1}\nc: *a", "here") == {"a": {"b": 1}, "c": {"b": 1}}
