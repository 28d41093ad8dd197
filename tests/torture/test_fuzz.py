"""A few seconds of the fuzzer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torture import fuzz

CASES = 8


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fuzz.Samples]:
    with fuzz.quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz.checkpoint, "MOST_TENSORS", 300)  # so that deep networks are refused sooner
        yield fuzz.make_samples(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_input_is_taken_or_refused_in_one_line(kind: str, samples: fuzz.Samples) -> None:
    results = {number: fuzz.run_case(kind, number, 0, samples) for number in range(CASES)}
    assert {number: result for number, result in results.items() if result not in ("passed", "refused")} == {}


def test_a_finding_is_told_with_what_repeats_it(samples: fuzz.Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(samples: fuzz.Samples, draw: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setitem(fuzz.KINDS, "broken", broken)
    results = list(fuzz.fuzz([("broken", 3), ("broken", 4)], 7, samples))
    assert [(kind, number) for kind, number, _ in results] == [("broken", 3), ("broken", 4)]
    assert results[0][2].startswith("KeyError: 'a mistake' (test_fuzz.py:")
