"""Verdicts of `scripts.understanding_claims` on made-up measurements of which they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripts.study import FAILED, HELD, OPEN
from scripts.understanding_claims import (
    ABOUT,
    JUDGES,
    MADE,
    MODELS,
    NETWORKS,
    PAIRS,
    UNTRIED,
    Row,
    claim_rows,
    claims_table,
    ends,
    lemma,
    lipschitz,
    summary_table,
    synthesis,
)

from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, Measurement
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
    worst = {"worst case": MeasuredAggregate(kind="worst", members={"linf": 1})} if "linf" in labels else {}
    about = Measurement.model_construct(cases=cases, n=1, seed=seed, population=None, aggregates=worst)
    return Facts(Run.__new__(Run), about, arrays)


def verdicts(rows: list[Row], claim: str) -> list[str]:
    return [row.verdict for row in rows if row.claim.startswith(claim)]


def lemma_at(eps: float, growth: tuple[float, float, float], inside: bool = True) -> dict[str, Any]:
    """Complexities that grow with d as these powers, half-way between the bounds of Lemma 1 or far above them."""
    d = np.array([48.0, 192, 768, 3072])
    clean, term = 0.01 * d[:, None] ** (0, 0.5, 1), eps * d[:, None] ** (0, 0.5, 1)
    found = (1 if inside else 9) * (clean + term / 2) * (d[:, None] / 48) ** (np.array(growth) - (0, 0.5, 1))
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


N = 200


def share(of: float) -> Any:
    """(N,) bool, true for this share of the images."""
    return np.arange(N) < of * N


# Of each of MODELS, where the measurements agree with the claims and where they do not.
RISES = {True: (1.5, 3.0, 2.0, 1.0), False: (2.0, 1.0, 1.0, 3.0)}  # of the loss around the weights
SEEN = {True: (0.9, 0.1, 0.6, 0.1), False: (0.01, 0.6, 0.2, 0.6)}  # share of pictures whose class others recognise
LINE = np.array([[1], [0.2], [0], [0.2], [1]])


def study_of(name: str, agrees: bool) -> list[Facts]:
    """What the studies of weights and loss, and the probes of perturbations, find of one of the four models."""
    rise, seen = (dict(zip(MODELS, values[agrees], strict=True))[name] for values in (RISES, SEEN))
    kinds = [0.3, 0.1, 0.5, 0.2, 0.2] if agrees else [0.3, 0.5, 0.1, 0.2, 0.2]  # all, convolution, QKV, …
    weights = {"sparsity/share": [kinds], "sparsity/share_by_tensor": [kinds]}
    weights |= lemma_at(0.001, (0, 0.5, 1), agrees) | lemma_at(1.0, (0.05 if agrees else 0.3, 0.5, 1), agrees)
    losses = ("line/clean", "line/adversarial")
    lines = [measured(dict.fromkeys(losses, LINE * (rise + 0.01 * seed)), "studies", seed) for seed in range(4)]
    pictures = {"perturbation/top1_negative": np.stack([share(seen)] * (1 + len(JUDGES)), 1)}
    pictures |= {fact: np.stack([share(seen)] * len(JUDGES), 1) for fact in MADE.values()}
    return [measured(weights, "studies"), measured(pictures), measured({"linf/correct": share(0.3)}), *lines]


def spectra_and_distances(order: int, agrees: bool) -> list[Facts]:
    """A network that has the `order`-th smallest singular values of all."""
    exponent = (10 + order) * np.linspace(1, 1.5, N)
    distance, ends_first = (1 / exponent, [0.6, 0.4, 0.6]) if agrees else (exponent, [0.4, 0.6, 0.4])
    sigma = np.tile(np.array(ends_first)[:, None], (N, 1, 1))
    grown = np.tile((1.2 if agrees else 1.8) ** np.arange(4), (N, 1))
    jacobian = {"jacobian/block": 1 + sigma, "jacobian/branch": sigma, "jacobian/exponent": exponent}
    growth = {"growth/attacked": grown, "growth/noise": grown, "growth/entering": grown[:, :-1]}
    bound = np.full(N, 10.0 + order)
    exact, loose = (bound, 1.5) if agrees else (1 / bound, 3.0)
    norms = {"table_2": bound, "sigma": exact[:, None], "looseness": np.full(N, loose)}
    return [
        measured({**jacobian, **growth, "distance/distance": distance}),
        measured({f"table-2/{name}": column for name, column in norms.items()}),
        measured({"fgsm/correct": share(0.5 - 0.05 * order if agrees else 0.05 * order)}),
        attention([1.0, 1.1] if agrees else [-1.0, -1.1], bound=2.0 if agrees else 0.9),
    ]


def everything(agrees: bool) -> dict[str, list[Facts]]:
    """Measurements of all models and networks that agree with every claim, or with none."""
    networks = {name: spectra_and_distances(order, agrees) for order, name in enumerate(NETWORKS)}
    untrained = {f"untrained-{name}": facts for name, facts in networks.items()}
    models = {name: [*spectra_and_distances(0, agrees), *study_of(name, agrees)] for name in MODELS}
    return {**models, **networks, **untrained}


@pytest.mark.parametrize(("agrees", "said"), [(True, HELD), (False, FAILED)])
def test_every_claim_holds_where_the_measurements_agree_with_it_and_fails_where_they_do_not(
    agrees: bool, said: str
) -> None:
    rows = claim_rows(everything(agrees))
    assert {row.claim.partition(":")[0] for row in rows} == ABOUT.keys()
    undecided = {"G5: sparser": OPEN, "G4: where ε dominates": UNTRIED}  # too few models; at the smaller radius
    for row in rows:
        others = [each for claim, each in undecided.items() if row.claim.startswith(claim)]
        assert row.verdict in (said, *others), row
    for claim, each in undecided.items():
        assert each in verdicts(rows, claim)
    assert claims_table(rows).count("\n") == len(rows) + 1


def test_images_made_for_a_class_are_judged_by_the_independent_classifier_too() -> None:
    rows = synthesis({name: study_of(name, True) for name in MODELS})
    judges = {row.compared.rpartition(" by ")[2] for row in rows}
    assert judges == set(JUDGES)
    assert len(rows) == len(MADE) * len(PAIRS) * (len(JUDGES) - 1)  # none by the standard model itself
    assert not any(row.compared.count(row.compared.rpartition(" by ")[2]) > 1 for row in rows)
