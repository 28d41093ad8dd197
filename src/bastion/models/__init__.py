"""Classifiers by name: bastion's own families, and any timm model as `timm/NAME`."""

from bastion.models.classifier import Backbone, Classifier
from bastion.registry import Registry

models: Registry[Backbone] = Registry("model", __name__, Backbone)
models.announce("cifar/*", "convstem/*", "covit/*", "fan/*", "rvt/*", "vit-cauchy/*", "xcit/*")

__all__ = ["Backbone", "Classifier", "models"]
