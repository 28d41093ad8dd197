"""Parameters, multiply-accumulates and memory, against what can be counted by hand; times that stand in order."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from bastion.models import Classifier
from bastion.models.checkpoint import digest
from bastion.studies.complexity import Complexity, peak_memory
from bastion.types import DataSet


def test_a_small_network_costs_what_one_counts_by_hand(tiny_model: Classifier, tiny_data: DataSet) -> None:
    facts = Complexity()(tiny_model, tiny_data, 0, seed=0)
    # A 3×3 convolution of 3 to 8 channels on 8×8 pixels, BatchNorm, and a linear layer of 8 to 3.
    assert facts["parameters"].item() == (3 * 9 * 8 + 8) + 2 * 8 + (8 * 3 + 3)
    assert facts["macs"].item() == 8 * 8 * 8 * 3 * 9 + 8 * 3


def test_it_takes_any_network_and_leaves_it_as_it_is(tiny_data: DataSet) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3, bias=False), nn.Dropout(0.5)).train()
    before = digest(network)
    facts = Complexity()(network, tiny_data, 0, seed=0)
    assert (facts["parameters"], facts["macs"]) == (576, 576)
    assert digest(network) == before and network.training
    assert all(each.grad is None and each.requires_grad for each in network.parameters())


class Encoder(nn.Module):
    """A TransformerEncoderLayer of width 4 on 8 tokens of 24 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=16, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(x.reshape(len(x), 8, 24))).mean(1))
        return logits


def test_attention_of_torch_costs_what_one_counts_by_hand(tiny_data: DataSet) -> None:
    """In eval mode it runs as one fused kernel, which torch's counter takes for nothing."""
    qkv_and_projection, maps, feed_forward = 8 * 4 * 4 * 4, 2 * 8 * 8 * 4, 8 * 2 * 4 * 16
    expected = 8 * 24 * 4 + qkv_and_projection + maps + feed_forward + 4 * 3
    assert Complexity()(Encoder(), tiny_data, 0, seed=0)["macs"] == expected


class Slow(nn.Module):
    """Takes a second forward and two more back, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(192, 3), 0.0

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def forward(self, x: Tensor) -> Tensor:
        self.wait(1)
        logits: Tensor = self.linear(x.flatten(1))
        if logits.requires_grad:
            logits.register_hook(lambda _: self.wait(2))  # type: ignore[no-untyped-call]
        return logits


def test_throughput_is_of_forward_passes_and_others_are_counted_in_them(
    tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Slow()
    monkeypatch.setattr(time, "perf_counter", lambda: network.seconds)
    facts = Complexity(batch=8, repeats=3)(network, tiny_data, 0, seed=0)
    assert facts["throughput"] == 8
    assert (facts["attack_pass"], facts["training_pass"]) == (3, 3)


@pytest.mark.parametrize("layers", [2, 6])
def test_memory_is_what_the_backward_pass_needs(layers: int) -> None:
    """A sigmoid keeps its output for its derivative; on the way back two more are alive at the same time."""
    network = nn.Sequential(*(nn.Sigmoid() for _ in range(layers)))
    x = torch.rand(4, 3, 32, 32, requires_grad=True)
    image = x.numel() * x.element_size()

    def run() -> None:
        torch.autograd.grad(network(x).sum(), x)

    assert layers * image <= peak_memory(run, x.device) <= (layers + 2) * image + 64


def test_what_was_freed_is_not_counted() -> None:
    def run() -> None:
        for _ in range(10):
            torch.ones(1000).exp().add_(1).view(10, 100)

    assert peak_memory(run, torch.device("cpu")) == 2 * 4000


def test_a_model_without_trained_weights_has_no_training_pass(tiny_model: Classifier, tiny_data: DataSet) -> None:
    facts = Complexity(repeats=1)(tiny_model.requires_grad_(False), tiny_data, 0, seed=0)
    assert facts["training_pass"].isnan() and facts["memory"] > 0
