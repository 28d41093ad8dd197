"""Verdicts of `scripts.understanding_claims` on made-up measurements of which they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripts.study import FAILED, HELD
from scripts.understanding_claims import (
    MODELS,
    NETWORKS,
    UNTRIED,
    Row,
    ends,
    lemma,
    lipschitz,
    summary_table,
)

from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredCase, Measurement
from bastion.run import Run

VITS = [name for name in (*MODELS, *NETWORKS) if name.endswith("-vit") or name.startswith("vit-")]
SCALES = np.array([0.25, 0.5, 1, 2, 4])


def measured(columns: dict[str, Any], kind: str = "probes", seed: int = 0) -> Facts:
    """A measurement with these columns, `label/name`."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    labels = dict.fromkeys(name.rpartition("/")[0] for name in arrays)
    cases = tuple(
        MeasuredCase(
            label=label,
            kind=kind,
            role="analysis",
            store=label,
            n=1,
            spec={"name": label},
            columns=tuple(name.rpartition("/")[2] for name in arrays if name.startswith(f"{label}/")),
        )
        for label in labels
    )
    about = Measurement.model_construct(cases=cases, n=1, seed=seed, population=None, aggregates={})
    return Facts(Run.__new__(Run), about, arrays)


def verdicts(rows: list[Row], claim: str) -> list[str]:
    return [row.verdict for row in rows if row.claim.startswith(claim)]


def lemma_at(eps: float, growth: tuple[float, float, float]) -> dict[str, Any]:
    """Complexities that grow with d as these powers, half-way between the bounds of Lemma 1."""
    d = np.array([48.0, 192, 768, 3072])
    clean, term = 0.01 * d[:, None] ** (0, 0.5, 1), eps * d[:, None] ** (0, 0.5, 1)
    found = (clean + term / 2) * (d[:, None] / 48) ** (np.array(growth) - (0, 0.5, 1))
    columns = {"dimension": d, "clean": clean, "adversarial": found, "adversarial_error": 0.01 * found}
    columns |= {"lower": 0.1 * (clean + term), "upper": clean + term}
    return {f"lemma-1 eps={eps}/{name}": column for name, column in columns.items()}


def test_lemma_1_is_tried_on_powers_of_the_dimension_only_where_eps_dominates() -> None:
    columns = lemma_at(0.001, (0.3, 0.9, 1.2)) | lemma_at(1.0, (0.05, 0.5, 1)) | {"sparsity/share": [[0.5]]}
    rows = lemma({"robust-vit": [measured(columns, "studies")]})
    small, large = (row for row in rows if "grows" in row.claim)
    assert (small.verdict, large.verdict) == (UNTRIED, HELD)
    assert "ε does not dominate" in small.found
    assert large.found.startswith("powers 0.05 [0.05, 0.05], 0.50")
    assert "| G4: Lemma 1 | 2 | 1 | – |" in summary_table(rows)  # the other powers leave the bounds


def test_lemma_1_fails_if_the_powers_are_others() -> None:
    columns = lemma_at(1.0, (0.3, 0.5, 1)) | {"sparsity/share": [[0.5]]}
    assert verdicts(lemma({"robust-vit": [measured(columns, "studies")]}), "G4: where")[0] == FAILED


def attention(powers: list[float], bound: float = 2.0) -> Facts:
    """Blocks whose attention grows with the tokens as these powers."""
    scaled = SCALES ** np.array(powers)[:, None]
    scale = np.tile(SCALES, (len(powers), 1))
    columns = {"attention/scaled": scaled, "attention/scaled_bound": bound * scaled, "attention/scale": scale}
    return measured(columns, "studies")


def test_the_growth_of_attention_is_averaged_over_the_blocks_of_a_vit_first() -> None:
    """Many blocks of few networks are not many networks."""
    powers = dict(zip(VITS, (1.5, -0.5, 1.5, -0.5, 1.5, -0.5), strict=True))
    rows = lipschitz({name: [attention([value] * 8)] for name, value in powers.items()})
    assert [row.verdict for row in rows] == [HELD, "cannot tell"]
    assert rows[1].compared.startswith("48 blocks of 6 ViTs")
    assert rows[1].found.startswith("as the scale to the power 0.50 [-0.65, 1.65]")  # of six numbers
    assert lipschitz({name: [attention([0.9, 1.1])] for name in VITS})[1].verdict == HELD


def test_attention_above_its_bound_fails() -> None:
    assert lipschitz({name: [attention([1.0], bound=0.9)] for name in VITS})[0].verdict == FAILED


def spectra(blocks: list[float], branches: list[float]) -> Facts:
    """Singular values of eight images, which differ by up to 1 %."""
    images = np.linspace(1, 1.01, 8)[:, None, None]
    return measured(
        {
            f"jacobian/{name}": images * np.array(part)[:, None]
            for name, part in (("block", blocks), ("branch", branches))
        }
    )


@pytest.mark.parametrize(("blocks", "said"), [([3, 1, 2], HELD), ([3, 2, 1], FAILED)])
def test_ends_are_compared_with_the_blocks_between_of_both_maps(blocks: list[float], said: str) -> None:
    results = {name: [spectra([3.0, 1.0, 1.0, 3.0], [3.0, 1.0, 1.0, 3.0])] for name in MODELS}
    results |= {prefix + name: results["robust-resnet"] for name in NETWORKS for prefix in ("", "untrained-")}
    rows = ends(results | {"robust-vit": [spectra([3.0, 1.0, 3.0], blocks)]})
    found = {row.compared: row.verdict for row in rows}
    assert found["8 images of robust-vit, x + F(x), 3 blocks"] == HELD
    assert found["8 images of robust-vit, F, 3 blocks"] == said
    assert found["8 images of standard-resnet, F, 4 blocks"] == HELD
    assert len(rows) == 12
