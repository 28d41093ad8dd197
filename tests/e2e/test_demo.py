"""The demo shows what it promises: the standard model falls, the robust one stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bastion.demo import run_demo
from bastion.measuring.facts import read_measurements
from bastion.run import open_run


@pytest.mark.slow
def test_the_standard_model_falls_and_the_robust_one_does_not(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    text = run_demo(tmp_path)
    assert "report.html" in text
    accuracies = {name: read_measurements(open_run(tmp_path / name))[0].accuracies() for name in ("standard", "robust")}
    assert accuracies["standard"]["clean"].low > 0.3
    assert accuracies["standard"]["pgd-20"].high < 0.05
    assert accuracies["robust"]["pgd-20"].low > 0.15
