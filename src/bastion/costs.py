"""What a run costs: floating-point operations, and hours on devices of a named kind. No torch.

A multiply-accumulate is two operations. A forward pass on an image is one unit of 2·MACs; so is the gradient of its
activations, and so is the gradient of the weights. A pass for the input's gradient thus costs 2, a training pass 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from bastion.errors import BastionError, did_you_mean

UTILISATION = 0.3  # of a device's peak; `docs/costs.md` has what the papers' own runs reached
THIS_MACHINE = "cpu"
CONVENTION = (
    "a multiply-accumulate is 2 FLOP; a forward pass counts 1, one for the input's gradient 2, a training pass 3"
)


@dataclass(frozen=True)
class Device:
    """Peaks in TFLOP/s, as its maker states them for dense products."""

    label: str
    bf16: float
    fp32: float | None = None  # None: it multiplies in bf16 only

    def peak(self, precision: str) -> tuple[float, str]:
        """In this precision or, where the device has no units for it, in bf16; and which of the two it is."""
        return (self.fp32, "fp32") if precision == "fp32" and self.fp32 else (self.bf16, "bf16")


DEVICES = {
    "a100": Device("A100", 312, 19.5),
    "h100": Device("H100 SXM", 989, 67),
    "tpuv3": Device("TPUv3 core", 123 / 2),  # a chip has two cores
    "tpuv4": Device("TPUv4 core", 275 / 2),
}


@dataclass(frozen=True)
class Fleet:
    """So many devices of one kind."""

    device: Device
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} × {self.device.label}"

    def hours(self, flops: float, precision: str, utilisation: float = UTILISATION) -> float:
        """At a constant share of the peak: more devices take proportionally less time."""
        return flops / (self.device.peak(precision)[0] * 1e12 * self.count * utilisation) / 3600


USUAL = (
    Fleet(DEVICES["a100"]),
    Fleet(DEVICES["a100"], 8),
    Fleet(DEVICES["h100"], 8),
    Fleet(DEVICES["tpuv4"], 64),
)


def fleet(text: str) -> Fleet:
    """Of `a100` or `a100:8`."""
    name, colon, count = text.lower().partition(":")
    if name == THIS_MACHINE:
        raise BastionError(f"--on {text}: {THIS_MACHINE} is this machine as it is; leave the number out")
    if name not in DEVICES:
        raise BastionError(f"--on {text}: unknown device '{name}'{did_you_mean(name, [*DEVICES, THIS_MACHINE])}")
    if colon and not (count.isdecimal() and int(count) > 0):
        raise BastionError(f"--on {text}: expected NAME:NUMBER such as {name}:8, got '{count}' for the number")
    return Fleet(DEVICES[name], int(count or 1))


def check_utilisation(share: float) -> float:
    if not 0 < share <= 1:
        raise BastionError(f"--utilisation {share:g}: expected a share of the peak above 0 and at most 1, such as 0.3")
    return share


def flops(macs: float, units: float, images: float) -> float:
    """Of `images` images, each of which takes `units` times a forward pass of so many multiply-accumulates."""
    return 2.0 * macs * units * images


def scientific(number: float) -> str:
    """6.8e18, as people write it."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration(hours: float) -> str:
    """In the unit that suits it."""
    for unit, length in (("h", 1.0), ("min", 1 / 60)):
        if hours >= length:
            return f"{hours / length:,.1f} {unit}"
    return f"{hours * 3600:.3g} s"
