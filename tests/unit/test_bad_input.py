"""Files and folders that strangers made, or nobody: one clear line, soon, and without harm."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import QUICK
from tests.unprivileged import closed, folder_for_all
from torch import Tensor, nn

from bastion import BastionError, journal, memory, settings, storage
from bastion.attacks import attacks
from bastion.data.idx import FILES, read_idx_folder
from bastion.data.imagefolder import imagefolder
from bastion.data.npz import npz
from bastion.data.picture import read_picture
from bastion.errors import Interrupted
from bastion.forward import loss_and_grad
from bastion.measuring import executors
from bastion.measuring.export import write_npz, write_pictures
from bastion.measuring.runner import measure
from bastion.models import Classifier, checkpoint
from bastion.models.import_checkpoint import import_file
from bastion.models.load import load
from bastion.plugins import own_files
from bastion.recipe import load_recipe
from bastion.recipe_files import DEEPEST
from bastion.recipe_yaml import read_fractions, read_value
from bastion.reporting.html import report
from bastion.reporting.leaderboard import leaderboard
from bastion.run import Run, open_run
from bastion.signals import StopRequest
from bastion.suite import MOST_CASES, load_suite
from bastion.training import checkpoints
from bastion.training.checkpoints import read_state, write_state
from bastion.training.trainer import train
from bastion.types import Batch, DataSet

LONG = "a" * 300
ONE_EPOCH = (*QUICK, "schedule.epochs=1")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / name / f"{number}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cat: (cat / "again").symlink_to(cat.parent), "a link to a folder that it lies in; remove it"),
        (lambda cat: (cat / "gone.png").symlink_to("nowhere"), "gone.png: a broken link, or not a file"),
        (lambda cat: (cat / "loop.png").symlink_to("loop.png"), "loop.png: a broken link, or not a file"),
        (lambda cat: os.mkfifo(cat / "pipe.png"), "pipe.png: a broken link, or not a file; repair or remove it"),
        (lambda cat: (cat / "\x1b[31m.png").touch(), "�.31m.png: its name is not text in UTF-8, or has control"),
        (lambda cat: open(os.fsencode(cat) + b"/\xff.png", "w").close(), "its name is not text in UTF-8"),
        (lambda cat: cat.rename(cat.with_name("a\nb")), "a b: its name is not text in UTF-8, or has control char"),
    ],
)
def test_odd_things_in_image_folders_are_named(pictures: Path, make: Callable[[Path], None], message: str) -> None:
    make(pictures / "cat")
    with pytest.raises(BastionError, match=message):
        imagefolder(str(pictures), size=8)


def test_a_folder_may_be_linked_to_from_beside_it(pictures: Path) -> None:
    (pictures / "dog" / "more").symlink_to(pictures / "cat")
    assert len(imagefolder(str(pictures), size=8, test_only=True).test) == 6


def test_a_picture_starts_no_other_program(tmp_path: Path) -> None:
    """Pillow would hand PostScript to Ghostscript, whatever the file is called."""
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(BastionError, match="a.png: not a readable picture .cannot identify"):
        read_picture(tmp_path / "a.png")


def test_a_picture_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"P6 1000000 1000000 255\n" + bytes(100))
    with pytest.raises(BastionError, match="a.png: not a readable picture .*exceeds limit"):
        read_picture(tmp_path / "a.png")


def _npz(path: Path, shape: str, kind: str = "|u1", payload: int = 12) -> Path:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("image", "label"):
            head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
            archive.writestr(f"{part}.npy", head + bytes(payload))
    return path


@pytest.mark.parametrize("shape", ["(10**12,)", "(9999999, 9999999, 9999999, 3)", "(2, 3, 4, 5)", "(-1, 12)", "12"])
def test_an_npz_file_that_claims_another_shape_is_refused_before_it_is_made(tmp_path: Path, shape: str) -> None:
    with pytest.raises(BastionError, match=r"a\.npz: (image claims the shape .* too short|not a .npz file)"):
        npz(str(_npz(tmp_path / "a.npz", shape)))


def test_an_npz_file_larger_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, image=np.zeros((9, 99, 99, 3), np.uint8), label=np.zeros(9, int))
    monkeypatch.setattr("bastion.memory._available", lambda _: 10_000)
    with pytest.raises(BastionError, match="a.npz: needs 0.0 GiB of memory, 0.0 GiB are free; use fewer images"):
        npz(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 10**6}, "model: asks for 1e[+]06; no option may be above 65536"),
        ({"depth": 60_000}, "model: asks for a network of more than 300 tensors; choose a smaller one"),
        ({"embed_dim": 60_000}, "model: needs .* GiB of memory"),
        ({"img_size": 60_000}, "model: asks for images of 3×60000×60000; that is out of bounds"),
        ({"stem": [1] * 3000}, "model"),
    ],
)
def test_a_network_of_absurd_size_is_refused_before_it_is_built(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MOST_TENSORS", 300)
    before = time.process_time()
    with pytest.raises(BastionError, match=message):
        checkpoint.build_backbone({"name": "vit/micro", **options})
    assert time.process_time() - before < 5


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    os.mkfifo(tmp_path / "card.json")
    for read in (storage.read_text, storage.read_json, storage.check_safetensors):
        with pytest.raises(BastionError, match="a.yaml: cannot be read: not a regular file"):
            read(tmp_path / "a.yaml")
    with pytest.raises(BastionError, match="no recipe"):
        load_recipe(tmp_path / "a.yaml")
    with pytest.raises(BastionError, match="no model"):
        load(tmp_path)


@pytest.mark.parametrize(
    "call", [load, open_run, load_recipe, lambda name: measure(name), lambda name: leaderboard(name, "x")]
)
def test_names_that_are_too_long_are_told(call: Callable[[str], Any]) -> None:
    with pytest.raises(BastionError, match="File name too long|no recipe 'a{300}'"):
        call(LONG)


@pytest.fixture
def measured(tiny_model: Classifier, tiny_data: DataSet) -> Iterator[Run]:
    with folder_for_all() as folder:
        measure(tiny_model, tiny_data, {"probes": {"clean": "accuracy"}}, folder=folder / "run", limit=8)
        run = open_run(folder / "run")
        run.log({"kind": "event", "step": 1, "message": "resumed"})
        yield run


@pytest.mark.parametrize("which", ["measurements", "measurements/*", "."])
def test_what_may_not_be_read_is_told_and_not_taken_for_missing(measured: Run, which: str) -> None:
    path = measured.folder if which == "." else next(measured.folder.glob(which))
    with closed(path), pytest.raises(BastionError, match="cannot be read: Permission denied"):
        report(measured.folder, measured.folder / "report.html")
    with closed(path), pytest.raises(BastionError, match="cannot be read: Permission denied"):
        leaderboard(measured.folder.parent, measured.folder / "page.html")


@pytest.mark.parametrize("which", ["facts", "facts/*/*/*", "log.jsonl", "provenance.json"])
def test_a_report_needs_all_that_is_there(measured: Run, which: str) -> None:
    (path,) = [each for each in measured.folder.glob(which) if each.name != "identity.json"]
    with closed(path), pytest.raises(BastionError, match="cannot be read: Permission denied"):
        report(measured.folder, measured.folder / "report.html")


def test_a_pictures_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with folder_for_all() as folder:
        for name in ("cat", "dog"):
            (folder / name).mkdir()
            Image.new("RGB", (8, 8)).save(folder / name / "0.png")
        with closed(folder / "dog"), pytest.raises(BastionError, match="dog: cannot be read: Permission denied"):
            imagefolder(str(folder), size=8)
        data = imagefolder(str(folder), size=8, test_only=True)
        with closed(folder / "dog" / "0.png"), pytest.raises(BastionError, match="0.png: cannot be read: Permission"):
            data.test.batch([0, 1])


@pytest.mark.parametrize(
    "line",
    ['{"kind": "step"}', '{"kind": "step", "step": "1"}', '{"kind": 7, "step": 1}', '{"kind": "event", "step": 1}'],
)
def test_a_log_line_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    run = Run(tmp_path)  # from before there were checksums
    run.log_file.write_text(f'{{"kind": "step", "step": 1}}\n{line}\n')
    with pytest.raises(BastionError, match="log.jsonl: line 2 has not the form of a record; restore or remove it"):
        run.history()


def test_numbers_of_a_log_that_are_none_are_not_drawn(measured: Run) -> None:
    for loss in (0.5, "abc", None, [1], {"a": 1}, True):
        measured.log({"kind": "step", "step": 1, "epoch": 1, "loss": loss})
    measured.log({"kind": "step", "step": 1, "loss": 0.5})
    report(measured.folder, measured.folder / "report.html")


def test_a_suite_whose_axes_have_no_end_is_refused_soon() -> None:
    axes = {f"a{n}": {"set": f"probes.p.threat.x{n}", "to": list(range(50))} for n in range(20)}
    with pytest.raises(BastionError, match=f"axes: 9.53674e[+]33 variants of probes and studies; {MOST_CASES:,} are"):
        load_suite({"axes": axes, "probes": {"p": {"name": "adversarial"}}})


def test_a_pattern_of_many_stars_takes_no_longer_than_one() -> None:
    suite = {"probes": {"a" * 60: "accuracy"}, "aggregates": {"mean": {"mean": ["*a" * 30 + "b"]}}}
    with pytest.raises(BastionError, match="no probe"):
        load_suite(suite)


@pytest.mark.parametrize(
    "change",
    ["a." * 2000 + "a=1", "batch=" + "9" * 400, "model=" + "[" * 300, "seed=1\nbatch=2", "seed=\x1b[31m", "a\x1b=1"],
)
def test_changes_that_are_absurd_are_refused_in_one_readable_line(change: str) -> None:
    with pytest.raises(BastionError) as told:
        load_recipe("tiny/demo-robust", [change])
    assert str(told.value).isprintable() and len(str(told.value)) < 500


def test_extending_the_same_file_any_number_of_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"extends: [{', '.join(['base/micro'] * (DEEPEST + 1))}]\n")
    with pytest.raises(BastionError, match=f"extends: expected the name of a recipe or a list of at most {DEEPEST}"):
        load_recipe(tmp_path / "a.yaml")


class SwitchesOff(nn.Module):
    """Leaves gradients switched off, before or after it has computed its logits."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.layer = first, nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            torch.set_grad_enabled(False)
        logits: Tensor = self.layer(x.flatten(1))
        torch.set_grad_enabled(False)
        return logits


def test_a_model_that_leaves_gradients_off_switches_off_its_own_alone() -> None:
    torch.manual_seed(0)
    batch = Batch(torch.arange(4), torch.rand(4, 3, 4, 4), torch.zeros(4, dtype=torch.long))
    found = [
        loss_and_grad(SwitchesOff(first), batch, nn.CrossEntropyLoss(reduction="none"))[2] for first in (True, False)
    ]
    assert (found[0] == 0).all() and (found[1] != 0).any()
    assert torch.is_grad_enabled()


def test_a_signal_that_ends_workers_first_is_a_stop_and_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to the whole group: the workers may be dead before this process has heard of it."""

    class Broken:
        _processes = None

        def __init__(self, *_: Any) -> None: ...

        def submit(self, *_: Any) -> Future[Any]:
            stop.received = signal.SIGTERM
            raise BrokenProcessPool

        def shutdown(self, **_: Any) -> None: ...

    stop = StopRequest()
    monkeypatch.setattr(executors, "ProcessPoolExecutor", Broken)
    monkeypatch.setattr(executors, "_check_portable", lambda _: None)
    work = executors.Work([Any], stop, lambda *_: None, lambda: False)  # type: ignore[list-item]
    with pytest.raises(Interrupted, match="0 of the 1 open batches are stored") as told:
        executors.in_processes(None, work, 2)  # type: ignore[arg-type]
    assert told.value.signal == signal.SIGTERM


def test_a_signal_stops_within_a_batch() -> None:
    """It raises where an attack reports its progress; what the batch has found is dropped."""
    stop, moved = StopRequest(), list[Any]()
    task: Any = SimpleNamespace(case=0, positions=range(4))
    work = executors.Work([task], stop, lambda *_: None, lambda: False, moved.append)

    def worker(_: Any) -> None:
        with journal.attacking(4, 10):
            journal.report_progress(5, 2)
            stop.received = signal.SIGTERM
            journal.report_progress(4, 2)
        raise AssertionError("went on")

    with pytest.raises(Interrupted, match="0 of the 1 open batches are stored") as told:
        executors.in_this_process(worker, work)  # type: ignore[arg-type]
    assert told.value.signal == signal.SIGTERM and len(moved) == 1


@pytest.mark.parametrize(
    "change",
    [
        *({"step": "3"}, {"step": 10**6}, {"best": None}, {"of": "x"}, {"of": {"recipe": 1}}, {"model": {}}),
        *({"model": []}, {"optimizer": {}}, {"optimizer": {"state": 5, "param_groups": []}}, {"computed": 3}),
    ],
)
def test_a_checkpoint_of_another_form_is_one_line(trained: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    (path,) = (folder / "checkpoints").iterdir()
    write_state(path, read_state(path) | change)
    with pytest.raises(BastionError, match=f"{path.name}: (has not the state of this|is of other data)"):
        train("base/micro", changes=ONE_EPOCH, folder=folder, resume=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("base/micro", changes=ONE_EPOCH, folder=tmp_path_factory.mktemp("trained") / "run").folder


def test_a_state_however_deep_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = '{"list": [' * 3000 + "1" + "]}" * 3000
    header = f'{{"content": {content}, "sha256": "{checkpoint.digest_tensors({})}"}}'
    monkeypatch.setattr(checkpoints.json, "dumps", lambda _: header)
    write_state(tmp_path / "state", {})
    monkeypatch.undo()
    with pytest.raises(BastionError, match="state: corrupt or truncated"):
        read_state(tmp_path / "state")


def test_a_small_file_that_unpacks_to_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(1 << 22))
    monkeypatch.setattr(memory, "_available", lambda _: 1 << 21)
    with pytest.raises(BastionError, match=r"import: .*w.pth: needs 0.0 GiB of memory, .* are free; get a smaller one"):
        import_file(tmp_path / "w.pth", {"name": "vit/micro"}, normalize="none")


@pytest.mark.parametrize("change", ["augment.padding=50000", "workers=100000"])
def test_settings_that_no_memory_is_enough_for_are_refused(change: str) -> None:
    with pytest.raises(BastionError, match="1024"):
        load_recipe("tiny/demo-robust", [change])


def test_leftovers_of_a_killed_export_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = {"x": np.zeros((1, 3, 2, 2), np.float32), "index": np.arange(1)}
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for name, write in {"adv.npz": write_npz, "png": write_pictures}.items():
        folder = tmp_path / name if name == "png" else tmp_path
        folder.mkdir(exist_ok=True)
        left = folder / f".{'000000.png' if name == 'png' else name}.{storage._HOST}-{child}-00000000.tmp"
        left.touch()
        write(tmp_path / name, examples)
        assert not left.exists()


def test_no_plug_in_is_loaded_that_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the working folder, not from a run, not from beside a recipe."""
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "evil.py").write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASTION_PLUGINS", raising=False)
    assert own_files("attacks") == []
    with pytest.raises(BastionError, match="unknown attack 'evil'"):
        attacks.build("evil")


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bastion.data.idx._MOST_BYTES", 1000)
    for name in FILES.values():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(BastionError, match="gz: holds more than 1,000 bytes: not a file of MNIST or the like"):
        read_idx_folder(tmp_path)


def test_each_row_of_the_table_of_untrusted_input_has_its_test() -> None:
    root = Path(__file__).parents[2]
    section = (root / "docs" / "reliability.md").read_text().partition("## Untrusted input")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`test_" in line]
    defined = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    assert len(rows) >= 14
    for name in re.findall(r"`(test_\w+)`", section):
        assert f"def {name}(" in defined, name


@pytest.mark.parametrize("text", ["{0}x", "{0}/x", "1/{0}x", "{0}.{0}x", ".{0}x", "1e{0}x", "{0} / {0}."])
def test_digits_without_end_are_read_in_linear_time(text: str) -> None:
    digits, before = text.format("9" * 200_000), time.process_time()
    assert read_value(digits.replace(".", "x"), "here")
    assert read_value(digits, "here") is not None
    assert read_fractions(digits)
    with pytest.raises(ValueError, match="expected a number"):
        settings._number(digits)
    assert time.process_time() - before < 20  # quadratic: minutes
