"""Common corruptions of images, ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich 2019), as tensor functions."""

from bastion.corruptions.apply import VERSION, check_name, corrupt
from bastion.corruptions.parameters import COMMON, EXTRA, NAMES, PROCEDURAL, SEVERITIES, ParameterSet

__all__ = ["COMMON", "EXTRA", "NAMES", "PROCEDURAL", "SEVERITIES", "VERSION", "ParameterSet", "check_name", "corrupt"]
