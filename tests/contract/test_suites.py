"""Shipped suites are the protocols that they name: norms, radii, steps and starts as in the papers or their code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bastion.attacks import Attack
from bastion.attacks.apgd import APGD
from bastion.attacks.cw import CW
from bastion.attacks.ensemble import AutoAttack
from bastion.attacks.minimal import Minimal
from bastion.attacks.patch import PatchGaussian, PatchOcclusion, PatchPGD
from bastion.attacks.patchfool import PatchFool
from bastion.attacks.pgd import PGD, fgsm
from bastion.measuring.worker import build_case
from bastion.papers import read_paper
from bastion.probes.attention_stability import AttentionStability
from bastion.probes.occlusion import Occlusion
from bastion.probes.patch_confidence import PatchConfidence
from bastion.recipe_files import PAPERS, shipped
from bastion.suite import Suite, load_suite

Protocol = dict[str, tuple[str, float | None, Attack]]
AA, FREE = AutoAttack(), ("linf", 1.0)

# label: norm, eps in pixel units, attack. Sources: the section named, or (code) the authors' release.
PROTOCOLS: dict[str, Protocol] = {
    # Debenedetti 2022, Sec. 4.1.2 and 4.1.9; steps of 1.5 eps / k from a random start (code)
    "debenedetti2022": {
        "fgsm": ("linf", 4 / 255, PGD(steps=1, rel_step=1.5)),
        "pgd-10": ("linf", 4 / 255, PGD(steps=10, rel_step=1.5 / 10)),
        "pgd-200": ("linf", 4 / 255, PGD(steps=200, rel_step=1.5 / 200)),
        "apgd-ce": ("linf", 4 / 255, APGD(steps=100, restarts=1)),
        "apgd-ce-5x100": ("linf", 4 / 255, APGD(steps=100, restarts=5)),
        "autoattack": ("linf", 4 / 255, AA),
    },
    # Tang et al. 2022, Sec. 3.1; 20 steps of 0.075 eps, random start, ART's l1 (code)
    "tang2022": {
        "pgd-20-linf": ("linf", 8 / 255, PGD(steps=20, rel_step=0.075)),
        "autoattack": ("linf", 8 / 255, AA),
        "pgd-20-l2": ("l2", 1.5, PGD(steps=20, rel_step=0.075)),
        "pgd-20-l1": ("l1", 40.0, PGD(steps=20, rel_step=0.075, dense=True)),
    },
    "tang2022-imagenette": {
        "pgd-20-linf": ("linf", 8 / 255, PGD(steps=20, rel_step=0.075)),
        "autoattack": ("linf", 8 / 255, AA),
        "pgd-20-l2": ("l2", 8.0, PGD(steps=20, rel_step=0.075)),
        "pgd-20-l1": ("l1", 1600.0, PGD(steps=20, rel_step=0.075, dense=True)),
    },
    # Singh et al. 2023, Sec. 3.1
    "singh2023": {
        "apgd-t-fast": ("linf", 4 / 255, APGD(steps=40, loss="dlr", targets=3)),
        "autoattack": ("linf", 4 / 255, AA),
        "autoattack-l2": ("l2", 2.0, AA),
        "autoattack-l1": ("l1", 75.0, AA),
    },
    # Wang and Ruan 2022, Sec. 5.2 and 5.3; alpha 2/255 of eps 2/255, 0.2 of 2
    "wang2022": {
        "fgsm": ("linf", 2 / 255, fgsm()),
        "pgd-7-linf": ("linf", 2 / 255, PGD(steps=7, rel_step=1.0)),
        "pgd-7-l2": ("l2", 2.0, PGD(steps=7, rel_step=0.2 / 2)),
        "pgd-20-l2": ("l2", 2.0, PGD(steps=20, rel_step=0.2 / 2)),
        "cw": ("l2", None, CW(c=1.0, kappa=0.0, lr=0.01, steps=100)),
    },
    # Guo et al. 2023, Fig. 1 and Sec. 3.1: 10 % of 14 x 14 patches; sigma 0.38 is ImageNet-C's severity 5
    "guo2023": {
        "pgd-5": ("linf", 8 / 255, PGD(steps=5, rel_step=2 / 8)),
        "patch-pgd-5": (*FREE, PatchPGD(share=0.1, size=16, choose="random", steps=5)),
        "patch-gaussian": (*FREE, PatchGaussian(share=0.1, size=16, sigma=0.38)),
        "patch-occlusion": (*FREE, PatchOcclusion(share=0.1, size=16)),
        "patch-fool": (*FREE, PatchFool()),
    },
    "patches": {
        "occlusion": (*FREE, PatchOcclusion(share=0.1, size=4)),
        "occlusion-worst-of-10": (*FREE, PatchOcclusion(share=0.1, size=4, draws=10)),
        "gaussian": (*FREE, PatchGaussian(share=0.1, size=4, sigma=0.38)),
        "adversarial-patch": (*FREE, PatchPGD(patches=1, size=4, steps=50)),
        "patch-fool": (*FREE, PatchFool()),
    },
    # the radii of RobustBench, and of Croce and Hein 2021 for l1
    "multinorm": {"linf": ("linf", 8 / 255, AA), "l2": ("l2", 0.5, AA), "l1": ("l1", 12.0, AA)},
    "distortion": {norm: (norm, None, Minimal()) for norm in ("linf", "l2", "l1")},
    "radius": {"distance": ("linf", None, Minimal())},
    # Debenedetti 2022, Sec. 4.3.1; step as in the code
    "interpretability": {
        "perturbation": ("linf", 4 / 255, PGD(steps=100, rel_step=1.5 / 100)),
        "frequency": ("linf", 4 / 255, PGD()),
    },
    "quick": {"apgd-ce-10": ("linf", 8 / 255, APGD(steps=10))},
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_suite_has_the_norms_radii_and_attacks_of_its_protocol(name: str) -> None:
    found = {}
    for case in load_suite(name).cases():
        probe: Any = build_case(case)
        if hasattr(probe, "attack"):
            threat = getattr(probe, "threat", None)
            found[case.label] = (threat.norm, threat.eps, probe.attack) if threat else (probe.norm, None, probe.attack)
    assert found.keys() == PROTOCOLS[name].keys()
    for label, (norm, eps, attack) in PROTOCOLS[name].items():
        assert found[label][0] == norm and found[label][2] == attack, label
        assert found[label][1] == (None if eps is None else pytest.approx(eps, rel=1e-12)), label


def test_the_resolution_suite_is_the_grid_of_table_5_with_an_l2_radius_that_grows_with_the_size() -> None:
    """Singh et al. 2023: Table 5, App. A.4 and D.5."""
    suite = load_suite("resolution")
    sizes, levels = (192, 224, 256, 288, 320, 352, 384, 400, 448), (2, 4, 6, 8)
    cases = {case.label: case for case in suite.cases()}
    assert suite.adapt_size and len(cases) == 9 + 4 * 9 + 9
    for size in sizes:
        l2 = cases[f"l2 size={size}"]
        assert l2.data == {"size": size} and l2.spec["threat"]["eps"] == pytest.approx(2 * size / 224)
        for level in levels:
            case = cases[f"linf eps={level}/255 size={size}"]
            assert case.data == {"size": size} and case.spec["threat"]["eps"] == level / 255
            assert build_case(case).attack == APGD(steps=40, loss="dlr", targets=3)


@pytest.mark.parametrize(("suite", "size"), [("guo2023", 16), ("occlusion", 4)])
def test_given_masks_are_those_of_the_figures(suite: str, size: int) -> None:
    """Guo et al. 2023: 10 % of the patches; 100 masks in Fig. 2, PGD-5 and severity 5 in Fig. 1, one mask in Fig. 5."""
    found = {case.label: build_case(case) for case in load_suite(suite).cases()}
    common = {"share": 0.1, "size": size}
    assert found["occlusion"] == Occlusion(masks=100, **common)
    assert found["confidence"] == PatchConfidence(eps=8 / 255, rel_step=2 / 8, steps=5, sigma=0.38, **common)
    assert found["attention"] == AttentionStability(masks=1, **common)


@pytest.mark.parametrize(
    ("suite", "paper", "absent"),
    [
        ("debenedetti2022", "xcit", {"hours"}),
        ("tang2022", "generalization", {"mean corruption accuracy"}),  # of the suite cifar10-c
        ("singh2023", "convstem", set()),
        ("wang2022", "cauchy", set()),
        ("guo2023", "rspc", {"mean corruption accuracy", "imagenet-a", "mCE", "mCE without noise", "mFR"}),
    ],
)
def test_labels_are_the_columns_of_the_papers_tables(suite: str, paper: str, absent: set[str]) -> None:
    chosen, source = load_suite(suite), read_paper(PAPERS / f"{paper}.yaml")
    columns: set[str] = set()
    for name in source.rows:
        columns |= (source.expected(name) or {}).keys() - {"source", "note"}
    assert chosen.paper == source.cite
    assert columns - {*chosen.probes, *chosen.aggregates} == absent


def test_corruptions_of_the_papers_are_measured_by_the_suites_of_the_published_data() -> None:
    for suite, paper, columns in (
        ("cifar10-c", "generalization", {"mean corruption accuracy"}),
        ("cifar10-c", "rspc", {"mean corruption accuracy"}),
        ("imagenet-c", "rspc", {"mCE", "mCE without noise"}),
    ):
        chosen, source = load_suite(suite), read_paper(PAPERS / f"{paper}.yaml")
        assert source.cite in chosen.paper
        assert columns <= chosen.aggregates.keys()
        assert any(columns <= (source.expected(name) or {}).keys() for name in source.rows)


def test_worst_cases_are_declared_over_exactly_the_attacks() -> None:
    for name in ("tang2022", "tang2022-imagenette"):  # Eq. 2
        assert list(load_suite(name).members("worst-case")) == ["pgd-20-linf", "autoattack", "pgd-20-l2", "pgd-20-l1"]
    assert list(load_suite("multinorm").members("worst case")) == ["linf", "l2", "l1"]


def test_the_full_suite_has_attacks_in_three_norms_distances_and_every_corruption() -> None:
    full, parts = load_suite("full"), [load_suite(name) for name in ("multinorm", "corruptions")]
    assert full.aggregates == parts[0].aggregates | parts[1].aggregates
    assert full.probes.keys() == {*parts[0].probes, *parts[1].probes, "sanity", *full.curves}
    assert len(full.members("mean corruption accuracy")) == 15 * 5


def test_the_analysis_suite_has_its_parts_at_their_own_radii() -> None:
    """Perturbations at 4/255, growth at 8/255, Lemma 1 at two; only sharpness and landscape are smaller."""
    analysis = load_suite("analysis")
    for name in ("jacobian", "interpretability", "weights", "landscape"):
        for case in load_suite(name).cases():
            found = [each for each in analysis.cases() if each.base == case.base]
            given = {**case.spec, "n": 64, "points": 11} if case.base == "landscape" else case.spec
            assert given in [each.spec for each in found], case.label
    assert [each.spec.get("eps") for each in analysis.cases() if each.base == "lemma-1"] == [8 / 255, 1]
    assert "jacobian-norms" in analysis.about and "--suite sharpness" in analysis.about


@pytest.mark.parametrize("name", shipped("suite"))
def test_every_row_of_a_suite_has_a_label_of_its_own_and_the_file_says_what_it_is(name: str) -> None:
    suite: Suite = load_suite(name)
    labels = [case.label for case in suite.cases()] + list(suite.aggregates)
    assert suite.about.endswith(".") and len(labels) == len(set(labels))


def test_autoattack_names_its_members_as_its_authors_do() -> None:
    for norm in ("linf", "l2", "l1"):
        assert [name for name, _ in AA.named_members(norm)] == ["apgd-ce", "apgd-t", "fab-t", "square"]


def test_the_documentation_lists_every_shipped_suite() -> None:
    text = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
    table = text.partition("## Suites that ship")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in cells for name in re.findall("`([^`]+)`", cell)) == sorted(shipped("suite"))
