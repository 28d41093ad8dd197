"""Which claims of the papers hold on the models of `understanding_study`: reads what was measured, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scripts.study import (
    FAILED,
    HELD,
    OPEN,
    both,
    minus,
    number,
    percent,
    points,
    students_t,
    table,
    transformed,
    verdict,
    with_label,
    within,
)

from bastion.measuring.correlation import spearman
from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.intervals import Estimate, mean, wilson
from bastion.measuring.paired import paired_difference
from bastion.reporting.figures.perturbation_growth import SLACK, growth
from bastion.run import open_run

Array = np.ndarray[Any, Any]
MODELS = ("robust-vit", "standard-vit", "robust-resnet", "standard-resnet")
NETWORKS = {
    **{f"vit-{size}": f"vit-cauchy/{size}" for size in ("t1", "t2", "t3", "t4")},
    **{f"covit-{size}": f"covit/{size}" for size in ("t1", "t2", "t3", "t4")},
}
JUDGE = "covit-t2"  # a classifier of a family of its own, which knows none of the four models
JUDGES = (JUDGE, "standard-vit", "standard-resnet")  # in the order of the probes' columns
PAIRS = (("robust-vit", "standard-vit"), ("robust-resnet", "standard-resnet"))
MADE = {
    "from noise": "from-noise/recognised",
    "from images": "from-images/recognised",
    "from noise, ε = 4,": "far-noise/recognised",
    "from images, ε = 4,": "far-images/recognised",
}
ABOUT = {
    "C1": "attention is Lipschitz on bounded tokens only",
    "C2": "smaller singular values, more robust",
    "C4": "the first and the last block have the largest singular values",
    "C7": "the bound of Table 2 stands for the singular value",
    "G4": "Lemma 1",
    "G5": "sparse weights go with robustness",
    "G11": "adversarial training sharpens a CNN's landscape and flattens a Transformer's",
    "T11": "perturbations of robust models are semantic",
    "T12": "images made for a class are recognisable if the model is robust",
}
NEAR = 0.1  # of an exponent of the dimension: nearer counts as equal
CHANCE = 0.1
TIGHT = 2  # times the exact value
UNTRIED = "–"  # the claim says nothing of this case

Results = Mapping[str, Sequence[Facts]]  # measurements, by model


class Row(NamedTuple):
    claim: str
    compared: str
    found: str
    verdict: str


def read(home: Path, networks: Sequence[str]) -> Results:
    names = (*MODELS, *networks, *(f"untrained-{name}" for name in networks))
    return {name: read_measurements(open_run(home / name)) for name in names}


def networks_of(results: Results) -> list[str]:
    return [name for name in NETWORKS if name in results]


def column(results: Results, name: str, fact: str) -> Array:
    """`jacobian/table_1` of a model."""
    facts = with_label(results[name], fact.rpartition("/")[0])
    return np.asarray(facts.columns[fact])


def numbers(results: Results, name: str, fact: str) -> Array:
    return column(results, name, fact).astype(np.float64)


def sigmas(results: Results, name: str, part: str) -> Array:
    """(n, blocks) largest singular values of `block` or `branch`; without blocks that have none."""
    values = numbers(results, name, f"jacobian/{part}")[..., 0]
    return values[:, np.isfinite(values).all(0)]


def distances(results: Results, name: str) -> tuple[Array, Array]:
    """Σσ and the smallest distance, of images that are classified right and were fooled."""
    distance, exponent = (numbers(results, name, fact) for fact in ("distance/distance", "jacobian/exponent"))
    known = (distance > 0) & np.isfinite(distance)
    return exponent[known], distance[known]


def median_distance(results: Results, name: str) -> float:
    return float(np.median(distances(results, name)[1]))


def mean_of(results: Results, name: str, fact: str) -> float:
    return float(np.nanmean(numbers(results, name, fact)))


def rises(results: Results, name: str, loss: str) -> Array:
    """(directions,) mean of the loss at both ends of a line less that of the model."""
    found = {facts.about.seed: facts for facts in results[name] if "line" in facts.labels}
    lines = [found[seed].columns[f"line/{loss}"][:, 0] for seed in sorted(found)]
    return np.array([(line[0] + line[-1]) / 2 - line[len(line) // 2] for line in lines])


def _mean(results: Results, name: str, fact: str) -> str:
    """Of the largest value, where there are several."""
    values = numbers(results, name, fact)
    return number(mean(values if values.ndim == 1 else values[:, 0]), ".3g")


def models_table(results: Results) -> str:
    """A column for each of the four models."""
    rows: dict[str, list[str]] = {}
    for name in MODELS:
        accuracies = with_label(results[name], "linf").accuracies()
        study = {key: value for facts in results[name] for key, value in facts.scalars().items()}
        cells = {f"{label}, %": percent(each) for label, each in accuracies.items()}
        cells |= {
            "σ̄ of Table 1": _mean(results, name, "jacobian/table_1"),
            "Σσ of F": _mean(results, name, "jacobian/exponent"),
            "σ of the network": _mean(results, name, "jacobian/network"),
            "median ℓ2 distance": f"{median_distance(results, name):.3f}",
            "weights below 0.01 of the largest, %": f"{100 * study['sparsity/sparsity']:.1f}",
            "… of their tensor's, %": f"{100 * numbers(results, name, 'sparsity/share_by_tensor')[0, 0]:.1f}",
            "kurtosis": f"{numbers(results, name, 'sparsity/kurtosis')[0, 0]:.1f}",
            "rise of the clean loss at 0.5": number(students_t(rises(results, name, "clean"))),
            "… of the adversarial one": number(students_t(rises(results, name, "adversarial"))),
            "largest eigenvalue of the Hessian": f"{study['sharpness/top']:.3g}",
            "its trace": f"{study['sharpness/trace']:.3g} ± {study['sharpness/trace_error']:.2g}",
        }
        for key, cell in cells.items():
            rows.setdefault(key, []).append(cell)
    return table(["", *MODELS], [[key, *cells] for key, cells in rows.items()])


def networks_table(results: Results) -> str:
    rows = []
    for name in networks_of(results):
        accuracies, largest = with_label(results[name], "fgsm").accuracies(), numbers(results, name, "jacobian/table_1")
        rows.append(
            [
                name,
                percent(accuracies["clean"]),
                percent(accuracies["fgsm"]),
                f"{median_distance(results, name):.3f}",
                f"{np.nanmean(largest):.3g} ({np.nanstd(largest, ddof=1):.2g})",
                f"{mean_of(results, name, 'jacobian/exponent'):.3g}",
                _mean(results, name, "table-2/table_2"),
                _mean(results, name, "table-2/looseness"),
            ]
        )
    head = ["", "clean, %", "FGSM, %", "median ℓ2", "σ̄ (std) of Table 1", "Σσ of F", "bound of Table 2", "bound / σ"]
    return table(head, rows)


def judges_table(results: Results) -> str:
    """Who recognises the class of a perturbation or of a made image."""
    shown = {"−δ": "perturbation/top1_negative", "δ": "perturbation/top1", **MADE}
    rows = [
        [
            f"{what.rstrip(',')}, {name}",
            *("itself" if judge == name else percent(_share(judged(results, name, fact, judge))) for judge in JUDGES),
        ]
        for what, fact in shown.items()
        for name in MODELS
    ]
    return table(["", *(f"by {judge}" for judge in JUDGES)], rows)


def judged(results: Results, name: str, fact: str, judge: str) -> Array:
    """(n,) bool; of perturbations the first column is the model's own."""
    seen = column(results, name, fact)
    return np.asarray(seen[:, JUDGES.index(judge) - len(JUDGES)], dtype=bool)


def _share(seen: Array) -> Estimate:
    return wilson(int(seen.sum()), len(seen))


def claim_rows(results: Results) -> list[Row]:
    made = (lipschitz, cauchy, ends, proxy, lemma, sparsity, landscape, semantic, synthesis)
    return [row for claim in made for row in claim(results)]


def claims_table(rows: Sequence[Row]) -> str:
    return table(["claim", "compared", "found", "verdict"], rows)


def summary_table(rows: Sequence[Row]) -> str:
    """How often each claim held, over all that it was tried on."""
    said = {name: [row.verdict for row in rows if row.claim.startswith(f"{name}:")] for name in ABOUT}
    made = [[f"{name}: {about}", *_counts(said[name])] for name, about in ABOUT.items()]
    return table(["claim", HELD, FAILED, OPEN], made)


def _counts(verdicts: Sequence[str]) -> list[str]:
    return [str(verdicts.count(each) or "–") for each in (HELD, FAILED, OPEN)]


class Attention(NamedTuple):
    measured: Array  # (blocks, scales)
    bound: Array
    scale: Array


def attention(results: Results, name: str) -> Attention:
    measured, bound, scale = (
        numbers(results, name, f"attention/{fact}") for fact in ("scaled", "scaled_bound", "scale")
    )
    return Attention(measured, bound, scale[0])


def lipschitz(results: Results) -> list[Row]:
    """C1, on every ViT: a bound for tokens of bounded length, and none without one."""
    names = [name for name in (*MODELS, *NETWORKS) if name in results and "vit" in name and "covit" not in name]
    vits = [attention(results, name) for name in names]
    above = sum(int((each.measured > each.bound).sum()) for each in vits)
    cases = sum(each.measured.size for each in vits)
    loose = np.concatenate([(each.bound / each.measured).ravel() for each in vits])
    powers = [np.mean([power(each.scale[-3:], block[-3:]).value for block in each.measured]) for each in vits]
    growing, compared = students_t(powers), f"{sum(len(each.measured) for each in vits)} blocks of {len(vits)} ViTs"
    return [
        Row(
            "C1: attention is Lipschitz where tokens are bounded",
            f"{compared}, tokens × ¼ to × 4",
            f"above the bound: {above} of {cases}; bound / measured: median {np.median(loose):.3g}",
            FAILED if above else HELD,
        ),
        Row(
            "C1: … and not where they are not: σ grows with the tokens",
            f"{compared}, tokens × 1 to × 4",
            f"as the scale to the power {number(growing)}, mean over the blocks of a ViT",
            verdict(growing),
        ),
    ]


def power(x: Array, y: Array) -> Estimate:
    """y grows as x to this power: the slope of their logarithms, with the interval of Student's t."""
    fitted = stats.linregress(np.log(x), np.log(y))
    slope, half = float(fitted.slope), float(stats.t.ppf(0.975, len(x) - 2) * fitted.stderr)
    return Estimate(slope, slope - half, slope + half, len(x))


def cauchy(results: Results) -> list[Row]:
    """C2: the bound of Eq. 15, and whether smaller singular values go with larger distances."""
    networks = networks_of(results)
    own = {name: spearman(*distances(results, name)) for name in (*MODELS, *networks)}
    over_networks = students_t([own[name].value for name in networks])
    exponents = [mean_of(results, name, "jacobian/exponent") for name in networks]
    across = spearman(np.array(exponents), np.array([median_distance(results, name) for name in networks]))
    found = {f"{own[name].n} images of {name}": own[name] for name in MODELS}
    found[f"images of one small network, mean over {len(networks)}"] = over_networks
    found[f"{len(networks)} small networks"] = across
    return [
        *(_bound(results, name) for name in MODELS),
        *(_correlated("C2: larger Σσ, smaller distance", compared, each, -1) for compared, each in found.items()),
    ]


def _correlated(claim: str, compared: str, found: Estimate, sign: int) -> Row:
    said = verdict(found if sign > 0 else minus(found))
    return Row(claim, compared, f"rank correlation {number(found)}", said)


def _bound(results: Results, name: str) -> Row:
    facts = with_label(results[name], "growth")
    grown = growth(facts, facts.case("growth"))
    assert grown.product is not None
    n, above = len(grown.attacked), int((grown.attacked > SLACK * grown.product).any(1).sum())
    loose = float(np.median(grown.product[:, -1] / grown.attacked[:, -1]))
    said = FAILED if above else HELD
    return Row(
        "C2: no perturbation grows beyond ∏(1 + σ)",
        f"{n} images of {name}, PGD at 1/255",
        f"longer: {percent(wilson(above, n))} %; ∏(1 + σ) / measured: median {loose:.3g}",
        said if n else OPEN,
    )


def ends(results: Results) -> list[Row]:
    """C4: the first and the last block against the median of those between."""
    rows, networks = [], networks_of(results)
    for part, sign in (("block", "x + F(x)"), ("branch", "F")):
        for trained, before in (("trained", ""), ("untrained", "untrained-")):
            means = [[end.mean() for end in _ratios(results, before + name, part)] for name in networks]
            compared = f"{len(networks)} small networks, {trained}, {sign}"
            rows.append(_ends(compared, [students_t(end) for end in zip(*means, strict=True)]))
        for name in MODELS:
            n, blocks = sigmas(results, name, part).shape
            compared = f"{n} images of {name}, {sign}, {blocks} blocks"
            rows.append(_ends(compared, [mean(end) for end in _ratios(results, name, part)]))
    return rows


def _ratios(results: Results, name: str, part: str) -> tuple[Array, Array]:
    """(n,) logarithms of σ of the first and of the last block over the median of the others."""
    logs = np.log(sigmas(results, name, part))
    inner = np.median(logs[:, 1:-1], axis=1)
    return logs[:, 0] - inner, logs[:, -1] - inner


def _ends(compared: str, made: Sequence[Estimate]) -> Row:
    first, last = (number(transformed(each, math.exp)) for each in made)
    found = f"over the median of the others: first × {first}, last × {last}"
    return Row("C4: the first and the last block have the largest σ", compared, found, both(*map(verdict, made)))


def proxy(results: Results) -> list[Row]:
    """C7: does √(‖J‖₁‖J‖∞) say what σ says?"""
    networks = networks_of(results)
    bound = np.array([mean_of(results, name, "table-2/table_2") for name in networks])
    exact = np.array([numbers(results, name, "table-2/sigma").max(1).mean() for name in networks])
    fgsm = np.array([column(results, name, "fgsm/correct").mean() for name in networks])
    distance = np.array([median_distance(results, name) for name in networks])
    all_of_them, claim = f"{len(networks)} small networks", "C7: larger bound, less robust"
    rows = [
        _correlated("C7: the bound puts networks in the order of σ", all_of_them, spearman(bound, exact), 1),
        _correlated(claim, f"{all_of_them}, FGSM at 2/255", spearman(bound, fgsm), -1),
        _correlated(claim, f"{all_of_them}, median ℓ2 distance", spearman(bound, distance), -1),
    ]
    for name in MODELS:
        loose = mean(numbers(results, name, "table-2/looseness"))
        said = verdict(minus(loose), -TIGHT)
        tight = f"C7: the bound is no more than {TIGHT} σ"
        rows.append(Row(tight, f"{loose.n} images of {name}", f"bound / σ {number(loose)}", said))
    return rows


def lemma(results: Results) -> list[Row]:
    """G4: Lemma 1 at each radius. The model has no part in it."""
    facts = with_label(results[MODELS[0]], "sparsity")
    return [row for label in facts.labels if label.startswith("lemma-1") for row in _lemma_at(results, label)]


def _lemma_at(results: Results, label: str) -> list[Row]:
    names = ("dimension", "clean", "adversarial", "adversarial_error", "lower", "upper")
    d, clean, found, error, low, high = (numbers(results, MODELS[0], f"{label}/{name}") for name in names)
    inside = (found + 1.96 * error >= low) & (found - 1.96 * error <= high)
    compared = f"ε = {label.rpartition('=')[2]}; p = 1, 2, ∞; d = {d.min():.0f} to {d.max():.0f}"
    return [
        Row(
            "G4: the complexity is between both bounds of Lemma 1",
            compared,
            f"{inside.sum()} of {inside.size} cases",
            HELD if inside.all() else FAILED,
        ),
        Row(f"G4: where ε dominates, it grows as d⁰, d^½, d, to {NEAR}", compared, *_powers(d, clean, found, high)),
    ]


def _powers(d: Array, clean: Array, found: Array, high: Array) -> tuple[str, str]:
    """The powers of d for p = 1, 2, ∞; no verdict where the term of ε is not larger than the clean complexity."""
    term, ratio = (high - clean) / clean, found / clean
    if (term > 1).all():
        powers = [power(d, each) for each in found.T]
        said = [within(each, wanted - NEAR, wanted + NEAR) for each, wanted in zip(powers, (0, 0.5, 1), strict=True)]
        return f"powers {', '.join(map(number, powers))}", both(*said)
    share = f"its term is {term.min():.2g} to {term.max():.2g} of the clean complexity"
    return f"adversarial / clean {ratio.min():.3f} to {ratio.max():.3f}: ε does not dominate, {share}", UNTRIED


def sparsity(results: Results) -> list[Row]:
    """G5: does sparsity go with robustness, and what is sparse inside of the ViT?"""
    worst = np.array([with_label(results[name], "linf").accuracies()["worst case"].value for name in MODELS])
    rows = []
    for fact, largest in (("share", "the model's largest"), ("share_by_tensor", "each tensor's")):
        shares = np.array([numbers(results, name, f"sparsity/{fact}")[0, 0] for name in MODELS])
        each = ", ".join(f"{name} {100 * share:.1f} %" for name, share in zip(MODELS, shares, strict=True))
        compared = "worst-case accuracy of the four models, of which two were trained for it"
        found = f"{each}; rank correlation {number(spearman(shares, worst))}"
        rows.append(Row(f"G5: sparser (below 0.01 of {largest}), more robust", compared, found, OPEN))
    kinds = ("convolution", "QKV", "projection", "feed-forward")  # rows of the facts, after that of all weights
    inside = dict(zip(kinds, numbers(results, "robust-vit", "sparsity/share")[0, 1:5], strict=True))
    order = sorted(inside, key=lambda kind: inside[kind])
    found = ", ".join(f"{kind} {100 * inside[kind]:.1f} %" for kind in reversed(order))
    said = HELD if (order[0], order[-1]) == ("convolution", "QKV") else FAILED
    return [*rows, Row("G5: inside, QKV is sparsest and convolution densest", "weights of robust-vit", found, said)]


def landscape(results: Results) -> list[Row]:
    """G11: rise of the loss at a distance from the weights; direction by direction, of the same random numbers."""
    rows = []
    wanted = (
        ("G11: adversarial training sharpens the CNN", "robust-resnet", "standard-resnet"),
        ("G11: … and flattens the Transformer", "standard-vit", "robust-vit"),
        ("G11: of the standard models the Transformer is sharper", "standard-vit", "standard-resnet"),
    )
    for claim, sharper, flatter in wanted:
        for loss in ("clean", "adversarial"):
            found = students_t(rises(results, sharper, loss) - rises(results, flatter, loss))
            compared = f"{sharper} less {flatter}: rise of the {loss} loss at 0.5, {found.n} directions"
            rows.append(Row(claim, compared, number(found), verdict(found)))
    return rows


def semantic(results: Results) -> list[Row]:
    """T11: are perturbations of robust models of their class, to models that did not make them?"""
    rows, fact = [], "perturbation/top1_negative"
    for robust, standard in PAIRS:
        for judge in (each for each in JUDGES if each != standard):
            ours, theirs = (_share(judged(results, name, fact, judge)) for name in (robust, standard))
            gain = _gain(results, robust, standard, fact, judge)
            claim = "T11: perturbations (−δ) of robust models are of their class, to others too"
            found = f"{percent(ours)} %, {percent(theirs)} %; difference {points(gain)}"
            said = both(verdict(ours, CHANCE), verdict(gain))
            rows.append(Row(claim, f"{robust} against {standard}, by {judge}", found, said))
            claim, said = "T11: … those of standard models are not (chance ± 5 points)", within(theirs, 0.05, 0.15)
            rows.append(Row(claim, f"{standard}, by {judge}", f"{percent(theirs)} %", said))
    gain = _gain(results, "robust-vit", "robust-resnet", fact, JUDGE)
    claim, compared = "T11: … the ViT's more than the CNN's", f"robust-vit less robust-resnet, by {JUDGE}"
    return [*rows, Row(claim, compared, points(gain), verdict(gain))]


def synthesis(results: Results) -> list[Row]:
    """T12: are images that were made for a class recognised only if the model is robust?"""
    rows = []
    for what, fact in MADE.items():
        for robust, standard in PAIRS:
            for judge in (each for each in JUDGES if each != standard):
                shares = [percent(_share(judged(results, name, fact, judge))) for name in (robust, standard)]
                gain = _gain(results, robust, standard, fact, judge)
                found = f"{shares[0]} %, {shares[1]} %; difference {points(gain)}"
                claim = f"T12: images made {what} are recognised if the model is robust"
                rows.append(Row(claim, f"{robust} against {standard}, by {judge}", found, verdict(gain)))
    return rows


def _gain(results: Results, name: str, other: str, fact: str, judge: str) -> Estimate:
    """Of the share that the judge recognises, on the same images."""
    return paired_difference(*(judged(results, each, fact, judge) for each in (other, name)))
