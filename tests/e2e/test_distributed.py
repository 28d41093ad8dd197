"""Two processes on one batch learn what one learns, and come back when one of them is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import rival
from tests.conftest import ADVERSARIAL, QUICK

from bastion import load
from bastion.run import Run
from bastion.training.checkpoints import read_state
from bastion.training.trainer import train

# Of all that training does: an attack, soft labels, the mean of the weights, clipping.
CHANGES = (*QUICK, *ADVERSARIAL, "schedule.epochs=1", "augment.mixup=0.8", "augment.cutmix=1.0")
WAYS = {
    "vit": ("ema=0.9", "optimizer.clip_grad=0.5"),
    "resnet": (
        "model={name: resnet/micro, widths: [8, 16], depths: [1, 1]}",
        "objective.attack_mode=train",
        "optimizer={perturb: {name: sam, size: 0.05}}",
    ),
    "rival": ("objective={name: rival, norm: true, clip: 0.1}", "validate.attack=null", "optimizer.clip_grad=0.5"),
    "rspc": (
        "objective={name: rspc, label_smoothing: 0.1, weight: 0.1, corruption_lr: 0.1}",
        "validate.attack=null",
    ),
    "sharded": ("objective.attack={name: apgd-train, steps: 2}",),
}
ONLY_TOGETHER = {"vit": ("accumulate=2",), "sharded": ("parallel=fsdp", "checkpoint.minutes=1e-6")}

# The last run once more, as if it had been stopped a step before its end.
SCRIPT = """
import json, os, shutil
import torch.distributed as dist
from bastion.training.trainer import train
for folder, changes in json.loads(os.environ["RUNS"]):
    train("base/micro", changes=tuple(changes), folder=folder)
again = folder + "-again"
if os.environ["RANK"] == "0":
    shutil.copytree(folder, again)
    shutil.rmtree(again + "/model")
    os.remove(max(os.scandir(again + "/checkpoints"), key=lambda file: file.name))
dist.barrier()
train("base/micro", changes=tuple(changes), folder=again, resume=True)
"""


@pytest.fixture(scope="module")
def both(torchrun: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All ways, each trained by two processes."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "script.py").write_text(SCRIPT)
    runs = [(str(folder / way), [*CHANGES, *WAYS[way], *ONLY_TOGETHER.get(way, ())]) for way in WAYS]
    plugins = folder / "plugins" / "objectives"
    plugins.mkdir(parents=True)
    shutil.copy(rival.__file__, plugins)
    torchrun(folder / "script.py", RUNS=json.dumps(runs), BASTION_PLUGINS=str(plugins.parent))
    return folder


def steps(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.history() if record["kind"] == "step"]


def weights(run: Run) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in load(run.folder).parameters()])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A way as one process trains it."""
    folder = tmp_path_factory.mktemp("alone")
    return cache(lambda way: train("base/micro", changes=(*CHANGES, *WAYS[way]), folder=folder / way))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_learn_what_one_learns(alone: Callable[[str], Run], both: Path, way: str) -> None:
    single, together = alone(way), Run(both / way)
    assert len(steps(single)) == len(steps(together)) == 3
    for one, two in zip(steps(single), steps(together), strict=True):
        assert one.keys() == two.keys()
        for key in {
            "loss",
            "grad_norm",
            "robust_accuracy",
            "lr",
            "eps",
            "alignment",
            "objective_grad_norm",
        } & one.keys():
            assert two[key] == pytest.approx(one[key], rel=1e-3), key
    assert torch.allclose(weights(together), weights(single), atol=2e-4)
    epochs = [[record for record in run.history() if record["kind"] == "epoch"] for run in (single, together)]
    assert epochs[0][0]["val_n"] == epochs[1][0]["val_n"] == 40
    assert epochs[1][0]["val_clean"] == pytest.approx(epochs[0][0]["val_clean"], abs=0.051)


@pytest.mark.parametrize("way", ["rival", "rspc"])
def test_an_objectives_own_networks_are_those_of_one_process(alone: Callable[[str], Run], both: Path, way: str) -> None:
    one, two = (read_state(run.checkpoints / "step-000000003.safetensors") for run in (alone(way), Run(both / way)))
    for name, tensor in one["objective"].items():
        assert torch.allclose(two["objective"][name], tensor, atol=1e-5), name
    for place, state in one["objective_optimizer"]["state"].items():
        buffer = two["objective_optimizer"]["state"][place]["momentum_buffer"]
        assert torch.allclose(buffer, state["momentum_buffer"], atol=1e-4)


def test_a_sharded_run_goes_on_where_it_was(both: Path) -> None:
    whole, again = Run(both / "sharded"), Run(both / "sharded-again")
    assert [r["message"] for r in again.history() if r["kind"] == "event"] == ["resumed at step 2"]
    assert torch.equal(weights(again), weights(whole))


KILLER = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from bastion.training.objectives import objectives
from bastion.training.objectives.standard import Standard

@objectives.register("killer")
@dataclass(kw_only=True)
class Killer(Standard):
    def prepare(self, model, batch, *, progress, seed):
        mark = Path(os.environ["KILLED"])
        if os.environ["RANK"] == "1" and progress >= 1.3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare(model, batch, progress=progress, seed=seed)
"""


@pytest.mark.slow  # torchrun waits half a minute for the processes that are left
def test_a_killed_process_starts_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins" / "objectives"
    plugins.mkdir(parents=True)
    (plugins / "killer.py").write_text(KILLER)
    env = {"BASTION_PLUGINS": str(tmp_path / "plugins"), "KILLED": str(tmp_path / "killed")}
    quick = (*QUICK, "optimizer={name: sgd, lr: 0.1}")  # Adam makes rounding errors large
    changes = [
        word for change in (*quick, "objective={name: killer, label_smoothing: 0.1}") for word in ("--set", change)
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = ["-m", "bastion", "train", "base/micro", *changes, "--dir", str(tmp_path / "struck")]
    subprocess.run([*launcher, *command], env={**os.environ, "OMP_NUM_THREADS": "1", **env}, check=True, timeout=240)
    assert Path(env["KILLED"]).exists()
    struck = Run(tmp_path / "struck")
    spared = train(
        "base/micro", changes=(*quick, "objective={name: standard, label_smoothing: 0.1}"), folder=tmp_path / "spared"
    )
    assert torch.allclose(weights(struck), weights(spared), atol=1e-5)
    assert [r["message"] for r in struck.history() if r["kind"] == "event"] == ["resumed at step 3"]
    assert [r["step"] for r in steps(struck)] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in steps(struck)] == pytest.approx([r["loss"] for r in steps(spared)], rel=1e-3)
