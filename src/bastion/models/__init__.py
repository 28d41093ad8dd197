"""Classifiers by name: bastion's own families, and any timm model as `timm/NAME`."""

from bastion.models.classifier import Backbone, Classifier
from bastion.models.variants import apply_variants
from bastion.registry import Registry

models: Registry[Backbone] = Registry("model", __name__, Backbone, finish=apply_variants)

__all__ = ["Backbone", "Classifier", "models"]
