"""Operations and hours are plain arithmetic; devices are known or refused."""

from __future__ import annotations

import pytest

from bastion.costs import DEVICES, USUAL, Fleet, check_utilisation, duration, fleet, flops, scientific
from bastion.errors import BastionError


def test_flops_are_two_for_each_multiply_accumulate_of_every_pass() -> None:
    # XCiT-S12 of the light recipe: one attack step (2) and a training pass (3), 110 epochs of ImageNet
    assert flops(4.82e9, 5, 110 * 1_281_167) == pytest.approx(4.82e9 * 2 * 5 * 110 * 1_281_167)
    assert flops(3, 2, 5) == 60


def test_hours_are_operations_over_the_speed_that_is_counted_on() -> None:
    eight = Fleet(DEVICES["a100"], 8)
    assert eight.hours(312e12 * 3600, "bf16", 1.0) == pytest.approx(1 / 8)
    assert eight.hours(312e12 * 3600, "bf16", 0.25) == pytest.approx(1 / 2)
    assert eight.hours(19.5e12 * 3600, "fp32", 0.5) == pytest.approx(1 / 4)
    assert eight.hours(1e18, "bf16") == pytest.approx(eight.hours(1e18, "bf16", 0.3))  # the default


def test_a_device_without_fp32_units_is_planned_in_bf16() -> None:
    assert DEVICES["tpuv4"].peak("fp32") == (137.5, "bf16")
    assert DEVICES["tpuv3"].peak("bf16") == (61.5, "bf16")
    assert DEVICES["h100"].peak("fp32") == (67, "fp32")
    assert DEVICES["h100"].peak("bf16") == (989, "bf16")


def test_devices_are_named_with_their_number() -> None:
    assert fleet("a100") == USUAL[0] == Fleet(DEVICES["a100"], 1)
    assert fleet("TPUv4:64") == USUAL[3]
    assert str(fleet("h100:8")) == "8 × H100 SXM"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a1000:8", r"--on a1000:8: unknown device 'a1000'; did you mean 'a100'\?"),
        ("rtx", "--on rtx: unknown device 'rtx'; known: a100, cpu, h100, tpuv3, tpuv4"),
        ("a100:0", "--on a100:0: expected NAME:NUMBER such as a100:8, got '0'"),
        ("a100:", "--on a100:: expected NAME:NUMBER"),
        ("a100:eight", "got 'eight' for the number"),
        ("a100:-1", "got '-1' for the number"),
        ("cpu:4", "--on cpu:4: cpu is this machine as it is; leave the number out"),
    ],
)
def test_unknown_devices_and_numbers_are_refused(text: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        fleet(text)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_utilisation_is_a_share(share: float) -> None:
    with pytest.raises(BastionError, match="--utilisation .*: expected a share of the peak above 0 and at most 1"):
        check_utilisation(share)
    assert check_utilisation(1.0) == 1.0


def test_numbers_are_written_for_people() -> None:
    assert scientific(6.794e18) == "6.79e18"
    assert scientific(9.999e12) == "1.00e13"
    assert scientific(0) == "0.00e0"
    assert [duration(hours) for hours in (12345.67, 1.0, 0.5, 1 / 60, 0.01, 1e-6)] == [
        *("12,345.7 h", "1.0 h", "30.0 min", "1.0 min", "36 s", "0.0036 s")
    ]
