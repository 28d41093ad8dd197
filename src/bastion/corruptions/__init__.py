"""Common corruptions of images, ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich 2019), as tensor functions."""

from bastion.corruptions.apply import VERSION, check_name, corrupt
from bastion.corruptions.parameters import COMMON, EXTRA, NAMES, PROCEDURAL, SEVERITIES, ParameterSet
from bastion.corruptions.sequences import PERTURBATIONS, PerturbationName, frames

__all__ = [
    "COMMON",
    "EXTRA",
    "NAMES",
    "PERTURBATIONS",
    "PROCEDURAL",
    "SEVERITIES",
    "VERSION",
    "ParameterSet",
    "PerturbationName",
    "check_name",
    "corrupt",
    "frames",
]
