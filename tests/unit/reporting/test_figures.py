"""How figures are found by name, and drawn for each case of a probe or study."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bastion import plugins
from bastion.reporting.figures import Figure, by_case, figures


def test_names_read_from_files_are_those_of_the_registry() -> None:
    shipped = [name for name in figures.names() if figures.factory(name).__module__.startswith("bastion.")]
    assert [name for name, _ in plugins.headlines("figures")] == shipped


def test_a_figure_by_case_is_drawn_for_each_case_in_turn() -> None:
    @by_case
    def bars(table: Any, case: Any) -> list[Figure]:
        """Bars."""
        return [Figure(f"{table} {case.label}"), Figure("more")]

    cases: list[Any] = [SimpleNamespace(label="one"), SimpleNamespace(label="two")]
    assert [figure.title for figure in bars("table", cases)] == ["table one", "more", "table two", "more"]  # type: ignore[arg-type]
    assert (bars.__doc__, bars.__name__, Path(bars.__code__.co_filename).stem) == ("Bars.", "bars", "__init__")
