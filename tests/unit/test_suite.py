"""Suites: what they say, what their axes make of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from bastion import BastionError
from bastion.recipe_files import shipped
from bastion.suite import load_suite, written

PGD = {"name": "adversarial", "threat": {"norm": "linf"}, "attack": "pgd"}
CURVE: dict[str, Any] = {
    "axes": {
        "eps": {"set": "probes.pgd.threat.eps", "to": [2 / 255, 8 / 255]},
        "size": {"set": ["data.size"], "to": [32, 64]},
    },
    "probes": {"clean": "accuracy", "pgd": PGD},
    "studies": {"cost": "complexity"},
    "aggregates": {
        "worst case": {"worst": ["clean", "pgd"]},
        "mean pgd": {"mean": ["pgd eps=8/255*"]},
        "score": {"errors": {"clean": 0.5, "pgd eps=2/255 size=32": 2.0}},
    },
}


def test_a_probe_or_study_by_name_is_a_suite_of_it_alone() -> None:
    (study,) = load_suite("sparsity", "studies.sparsity.margin=0.1").cases()
    assert (study.label, study.kind, study.spec) == ("sparsity", "studies", {"name": "sparsity", "margin": 0.1})
    (probe,) = load_suite("input-gradient").cases()
    assert (probe.label, probe.kind, probe.spec) == ("input-gradient", "probes", {"name": "input-gradient"})
    assert len(load_suite("jacobian").cases()) > 1  # a suite of the same name comes first


def test_axes_make_a_case_of_every_value_that_reaches_a_probe() -> None:
    cases = load_suite(CURVE).cases()
    assert [case.label for case in cases] == [
        "clean size=32",
        "clean size=64",
        "pgd eps=2/255 size=32",
        "pgd eps=2/255 size=64",
        "pgd eps=8/255 size=32",
        "pgd eps=8/255 size=64",
        "cost size=32",
        "cost size=64",
    ]
    assert cases[3].spec == {"name": "adversarial", "threat": {"norm": "linf", "eps": 2 / 255}, "attack": "pgd"}
    assert cases[3].data == {"size": 64}
    assert cases[3].at == {"eps": 2 / 255, "size": 64}


def test_an_axis_may_reach_into_the_short_form_of_a_plug_in() -> None:
    axis = {"steps": {"set": "probes.pgd.attack.steps", "to": 5}}
    (case,) = load_suite({"axes": axis, "probes": {"pgd": {**PGD, "threat": {"norm": "l2", "eps": 1}}}}).cases()
    assert case.label == "pgd"  # one value needs no name
    assert case.spec["attack"] == {"name": "pgd", "steps": 5}


def test_aggregates_name_probes_variants_or_patterns() -> None:
    suite = load_suite(CURVE)
    assert len(suite.members("worst case")) == 6
    assert list(suite.members("mean pgd")) == ["pgd eps=8/255 size=32", "pgd eps=8/255 size=64"]
    assert suite.members("score") == {"clean size=32": 0.5, "clean size=64": 0.5, "pgd eps=2/255 size=32": 2.0}


def test_a_case_that_two_patterns_name_counts_once_and_may_not_have_two_weights() -> None:
    labels = {"mean": ["pgd", "pgd eps=8/255*"]}
    assert len(load_suite({**CURVE, "aggregates": {"twice": labels}}).members("twice")) == 4
    for kind in ("errors", "sum"):
        with pytest.raises(
            BastionError, match=r"aggregates.twice: 'pgd' and 'pgd eps=8/255\*' both name 'pgd eps=8/255"
        ):
            load_suite({**CURVE, "aggregates": {"twice": {kind: {"pgd": 1, "pgd eps=8/255*": 2}}}})


@pytest.mark.parametrize("changes", [{"eps": 4 / 255}, ["eps=4/255"], "eps=4/255"])
def test_a_change_may_name_an_axis(changes: Any) -> None:
    suite = load_suite("autoattack-linf", changes)
    assert {case.spec["threat"]["eps"] for case in suite.cases() if "threat" in case.spec} == {4 / 255}
    assert [case.label for case in suite.cases()] == ["clean", "autoattack", "sanity"]


def test_a_change_may_name_any_key() -> None:
    suite = load_suite("demo", ["probes.pgd-20.attack.steps=5", "eps=[1/255, 2/255]"])
    assert [case.spec["attack"]["steps"] for case in suite.cases() if "attack" in case.spec] == [5, 5]


def test_an_axis_reaches_a_probe_whose_label_has_a_dot() -> None:
    axis = {"eps": {"set": "probes.l-0.5.threat.eps", "to": [0.1, 0.2]}}
    cases = load_suite({"axes": axis, "probes": {"l-0.5": PGD}}).cases()
    assert [case.spec["threat"]["eps"] for case in cases] == [0.1, 0.2]


def test_settings_of_one_axis_move_together_each_by_its_factor() -> None:
    paths = {"data.size": 1, "probes.pgd.threat.eps": 1 / 112}
    suite = {"axes": {"size": {"set": paths, "to": [192, 224]}}, "probes": {"pgd": PGD}}
    assert [(case.label, case.data, case.spec["threat"]["eps"]) for case in load_suite(suite).cases()] == [
        ("pgd size=192", {"size": 192}, pytest.approx(12 / 7)),
        ("pgd size=224", {"size": 224}, pytest.approx(2)),
    ]
    with pytest.raises(BastionError, match="factors are for numbers, got small, large"):
        load_suite({"axes": {"size": {"set": paths, "to": ["small", "large"]}}, "probes": {"pgd": PGD}})


def test_a_change_may_leave_a_probe_out_and_any_other_makes_it_no_longer_the_papers() -> None:
    suite = load_suite("guo2023", ["probes.patch-fool=null", "size=4"])
    assert "patch-fool" not in suite.probes and suite.paper == "Guo et al. 2023"
    with pytest.raises(BastionError, match="aggregates.worst-case: no probe 'autoattack'"):
        load_suite("tang2022", "probes.autoattack=null")
    assert load_suite("tang2022", ["probes.autoattack=null", "aggregates.worst-case=null"]).aggregates == {}
    assert load_suite("guo2023", "probes.pgd-5.attack.steps=10").paper == ""


def test_variants_that_would_look_alike_are_refused() -> None:
    axis = {"eps": {"set": "probes.pgd.threat.eps", "to": [0.010001, 0.010002]}}
    with pytest.raises(BastionError, match="'pgd eps=0.01': two rows would have this label"):
        load_suite({"axes": axis, "probes": {"pgd": PGD}})


def test_a_probe_may_have_a_variant_of_the_data_of_its_own() -> None:
    fog = {"name": "accuracy", "role": "corruption", "data": {"corruption": "fog"}}
    suite: dict[str, Any] = {
        "axes": {"severity": {"set": "probes.fog.data.severity", "to": [1, 5]}},
        "data": {"size": 32},
        "probes": {"clean": "accuracy", "fog": fog},
        "aggregates": {"flips": {"sum": {"fog": 0.5}, "column": "prediction"}},
    }
    clean, first, second = load_suite(suite).cases()
    assert clean.data == {"size": 32} and clean.spec == {"name": "accuracy"}
    assert first.data == {"size": 32, "corruption": "fog", "severity": 1} and first.spec == {"name": "accuracy"}
    assert second.data["severity"] == 5 and second.label == "fog severity=5"
    assert load_suite(suite).members("flips") == {first.label: 0.5, second.label: 0.5}


def test_a_role_may_be_given() -> None:
    (case,) = load_suite({"probes": {"foggy": {"name": "accuracy", "role": "corruption"}}}).cases()
    assert (case.role, case.spec) == ("corruption", {"name": "accuracy"})
    with pytest.raises(BastionError, match="probes.foggy.role: expected one of clean, attack"):
        load_suite({"probes": {"foggy": {"name": "accuracy", "role": "fog"}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"probe": {}}, "suite: probe: unknown key; did you mean 'probes'"),
        ({"about": "nothing"}, "needs at least one probe or study"),
        ({"probes": {"": "accuracy"}}, "choose another one"),
        ({"probes": {"a/b": "accuracy"}}, "choose another one"),
        ({"probes": {"a": "accuracy"}, "aggregates": {"a": {"worst": ["a"]}}}, "choose another one"),
        ({"probes": {"a": "accuracy"}, "aggregates": {"w": {"worst": ["b"]}}}, "no probe 'b' in this suite"),
        ({"probes": {"a": "accuracy"}, "aggregates": {"w": {}}}, "expected one of worst, mean, errors, sum"),
        ({"probes": {"a": "accuracy"}, "axes": {"e": {"set": "a.b", "to": 1}}}, "expected data.KEY, probes.LABEL.KEY"),
        ({"probes": {"a": "accuracy"}, "axes": {"e": {"set": "probes.b.eps", "to": 1}}}, "axes.e: no probe or study"),
        ({"probes": {"a": "accuracy"}, "axes": {"e": {"set": "data.size"}}}, "axes.e.to: missing"),
        ({"probes": {"a": "accuracy"}, "curves": {"b": [0.1]}}, "curves.b: no probe 'b' in this suite"),
    ],
)
def test_mistakes_are_told_with_their_place(content: dict[str, Any], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        load_suite(content)


def test_shipped_suites_load_and_never_mix_worst_cases_with_means() -> None:
    for name in shipped("suite"):
        suite = load_suite(name)
        assert suite.about
        attacks = {case.label for case in suite.cases() if case.spec["name"] == "adversarial"}
        for label, each in suite.aggregates.items():
            assert (each.kind == "worst") == bool(attacks & suite.members(label).keys()), label


@pytest.mark.parametrize(
    ("value", "text"),
    [(8 / 255, "8/255"), (0.5, "0.5"), (1.5 / 255, "1.5/255"), (12.0, "12"), (3, "3"), ("fog", "fog")],
)
def test_values_are_written_as_people_write_them(value: Any, text: str) -> None:
    assert written(value) == text


@pytest.mark.parametrize("change", ["severity=5", "severity=[4, 5]", "type=[fog, snow]", "axes.severity.to=[5]"])
def test_mce_over_fewer_severities_or_types_is_left_out(change: str) -> None:
    """Its weights are for 15 types and 5 severities: with one of these it would be a fifth."""
    assert load_suite("imagenet-c", change).aggregates.keys() == {"mean corruption accuracy"}


def test_a_number_relative_to_alexnets_is_for_the_data_that_alexnet_was_measured_on() -> None:
    plain = {"mean corruption accuracy"}
    weighted = {"mCE", "relative mCE", "mCE without noise"}
    assert load_suite("imagenet-c").aggregates_on("imagenet-c").keys() == plain | weighted
    assert load_suite("imagenet-c").aggregates_on("imagenet").keys() == plain
    for name in ("imagenet", "imagenet-val"):
        assert "mFR" in load_suite("imagenet-p").aggregates_on(name)
    assert load_suite("imagenet-p").aggregates_on("cifar10").keys() == load_suite("perturbations").aggregates.keys()


def test_a_probe_that_a_worst_case_needs_cannot_be_left_out_alone_and_the_message_says_how() -> None:
    with pytest.raises(BastionError, match=r"no probe 'autoattack' .*too: --set aggregates\.worst-case=null"):
        load_suite("tang2022", "probes.autoattack=null")
    assert load_suite("tang2022", ["probes.autoattack=null", "aggregates.worst-case=null"]).paper


def test_corruptions_may_be_stored_as_jpeg_as_imagenet_c_was() -> None:
    corrupted = load_suite("corruptions", "probes.corrupted.data.jpeg85=true").cases()[1:]
    assert len(corrupted) == 75 and all(case.data["jpeg85"] is True for case in corrupted)


def test_an_imagenette_c_is_made_as_imagenet_c_was() -> None:
    corrupted = [case for case in load_suite("imagenette-c").cases() if case.base == "corrupted"]
    assert len(corrupted) == 75 and all(case.data["jpeg85"] for case in corrupted)
    assert not load_suite("imagenette-c").paper  # its images are other ones


def test_a_weighted_sum_over_as_many_variants_is_kept() -> None:
    assert "mCE" in load_suite("imagenet-c", "severity=[5, 4, 3, 2, 1]").aggregates
    assert load_suite("imagenet-p", "perturbation=[tilt, snow]").aggregates.keys() == {
        "mean flip rate",
        "tilt",
        "snow",
    }


def test_fewer_corruptions_than_a_paper_measured_are_not_its_protocol() -> None:
    assert load_suite("cifar10-c").paper == ("Guo et al. 2023", "Tang et al. 2022")
    assert not load_suite("cifar10-c", "severity=5").paper
    assert load_suite("singh2023", "eps=2/255").paper == load_suite("singh2023").paper


def test_an_axis_with_fewer_values_leaves_out_aggregates_over_the_others() -> None:
    one_severity = load_suite("corruptions", "severity=5")
    assert one_severity.aggregates.keys() == load_suite("corruptions").aggregates.keys()
    assert list(one_severity.members("fog")) == ["corrupted type=fog"]
    two_types = load_suite("corruptions", "type=[fog, snow]")
    assert two_types.aggregates.keys() == {"mean corruption accuracy", "fog", "snow"}
    assert len(two_types.members("mean corruption accuracy")) == 10
    assert load_suite("corruptions", ["type=fog", "severity=5"]).aggregates.keys() == {
        "mean corruption accuracy",
        "fog",
    }
