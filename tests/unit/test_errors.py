"""What is told to people: one line, and nothing in it that a terminal obeys."""

from __future__ import annotations

import io
import pickle

import pytest
from rich.table import Table

from bastion.errors import BastionError, Interrupted, did_you_mean, printable, shown
from bastion.progress import SafeConsole
from bastion.settings import SettingsError

HOSTILE = "\x1b[2J\x1b]0;title\x07 \x9b31m \x00 \u202egnp.exe \udcff"


@pytest.mark.parametrize("text", ["plain", "Zürich ℓ∞ ≤ 8/255\xa0%", "👨‍👩‍👧", "two\nlines\tand a tab", ""])
def test_text_of_any_language_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable(HOSTILE) == "�[2J�]0;title� �31m � �gnp.exe �"


def test_an_error_is_one_line_whatever_it_is_about() -> None:
    assert str(BastionError(f"a:\r\n{HOSTILE}\nb")) == "a: �[2J�]0;title� �31m � �gnp.exe � b"


def test_a_console_prints_names_without_their_escape_sequences() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system="standard", width=80)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE, markup=False)
    console.print(table)
    console.print("[red]red")
    said = file.getvalue()
    assert "�[2J" in said and "\x1b[31mred" in said  # its own colours are still there
    assert not any(each in said for each in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\x00", "\u202e", "\udcff"))


def test_errors_can_be_sent_from_one_process_to_another() -> None:
    for error in (BastionError("a"), Interrupted("b", 15), SettingsError("pgd", ["steps", 0], "too few")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert pickle.loads(pickle.dumps(Interrupted("b", 15))).signal == 15


def test_a_value_in_a_message_is_as_much_as_can_be_read() -> None:
    assert shown("a") == "'a'"
    assert len(shown("a" * 10**6)) == 200
    assert shown(10**5000).startswith("a int (Exceeds the limit")


def test_suggestions_ignore_case_and_punctuation() -> None:
    assert did_you_mean("WeightDecay", ["weight_decay", "warmup"]) == "; did you mean 'weight_decay'?"
    assert did_you_mean("alpha", ["step", "steps"]) == "; did you mean 'step'?"
    assert did_you_mean("alpha", ["steps", "restarts"]) == "; known: restarts, steps"  # whose steps have no length


@pytest.mark.parametrize(
    ("elsewhere", "ours"),
    [
        ("FABAttack", "fab"),
        ("LinfPGD", "pgd"),
        ("L2CarliniWagnerAttack", "cw"),
        ("L2ProjectedGradientDescentAttack", "pgd"),
        ("LinfFastGradientAttack", "fgsm"),
        ("AA", "autoattack"),
        ("AutoAttack", "autoattack"),
        ("FFGSM", "fgsm-rs"),
        ("TPGD", "pgd:loss=kl"),
    ],
)
def test_an_attack_by_its_name_in_another_library_is_ours(elsewhere: str, ours: str) -> None:
    known = ["apgd", "autoattack", "cw", "deepfool", "fab", "fgsm", "fgsm-rs", "mi-fgsm", "pgd", "square"]
    assert did_you_mean(elsewhere, known) == f"; did you mean '{ours}'?"
    assert did_you_mean("at", ["adversarial", "alp", "mart"]) == "; did you mean 'adversarial'?"


@pytest.mark.parametrize("name", ["SparseFool", "NewtonFoolAttack", "GenAttack", "EADAttack", "L2DDNAttack"])
def test_an_attack_that_has_no_counterpart_is_not_taken_for_another(name: str) -> None:
    known = ["apgd", "autoattack", "deepfool", "fgsm", "patchfool", "pgd", *map(str, range(20))]
    assert did_you_mean(name, known) == ""
