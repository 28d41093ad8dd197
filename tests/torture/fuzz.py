"""Mutations of all that bastion reads: each ends well or in one clear line, soon and in bounded memory.

    python -m tests.torture.fuzz --count 10000 --seed 0
    python -m tests.torture.fuzz --only cards --first 17 --count 1 --seed 0     # one case again, with its traceback

A case is a pure function of seed, kind and number. Cases run in a process with a limit on its memory, which is replaced
when it dies or hangs. A finding is anything but success or a `BastionError` of one line without control characters.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import random
import resource
import select
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from PIL import Image

from bastion import cli, recipe_yaml, storage
from bastion.data import acquire, cifar, download, idx
from bastion.data.imagefolder import FolderSplit, list_pictures
from bastion.data.npz import npz
from bastion.errors import BastionError, printable
from bastion.measuring import runner
from bastion.measuring.facts import read_measurements, write_measurement
from bastion.measuring.measurement import MeasuredCase, Measurement
from bastion.measuring.store import FactStore
from bastion.measuring.worker import build_case
from bastion.models import checkpoint, import_checkpoint
from bastion.models.load import load
from bastion.recipe import load_recipe
from bastion.recipe_files import SHIPPED
from bastion.reporting.html import report
from bastion.run import Run, create_run, environment
from bastion.suite import load_suite
from bastion.training import trainer
from bastion.training.build import build_objective
from bastion.training.checkpoints import read_state, write_state
from tests.torture.mutations import VALUES, YAML_PIECES, mutate_bytes, mutate_structure, mutate_text
from tests.torture.record import Record

SECONDS = 10.0  # of the processor, a case
PATIENCE = 120.0  # seconds of the clock
MEMORY = 2 << 30  # bytes beside what is taken before the first case
SPEC = {"name": "vit/micro", "stem": [8, 16], "embed_dim": 16, "depth": 1, "num_heads": 2}


class NotOneLine(Exception):
    """The command line said something else than one line."""


@dataclass
class Samples:
    """A folder with one good file of everything, made before the first case, and what is read from them once."""

    folder: Path
    texts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)

    def fresh(self, name: str, content: bytes) -> Path:
        path = self.folder / "case" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


Case = Callable[[Samples, random.Random], None]
KINDS: dict[str, Case] = {}


def kind(case: Case) -> Case:
    KINDS[case.__name__] = case
    return case


@kind
def recipes(samples: Samples, draw: random.Random) -> None:
    text = mutate_text(draw.choice(samples.texts["recipes"]), draw)
    recipe = load_recipe(samples.fresh("recipe.yaml", text.encode(errors="surrogatepass")))
    build_objective(recipe)
    yaml.safe_load(yaml.safe_dump(recipe.resolved()))
    recipe.hash()


@kind
def suites(samples: Samples, draw: random.Random) -> None:
    text = draw.choice(samples.texts["suites"])
    if draw.random() < 0.5:
        given: Any = mutate_structure(recipe_yaml.read(text, "shipped"), draw)
    else:
        given = samples.fresh("suite.yaml", mutate_text(text, draw).encode(errors="surrogatepass"))
    for case in load_suite(given).cases()[:10]:
        build_case(case)


@kind
def changes(samples: Samples, draw: random.Random) -> None:
    keys = (
        "seed",
        "model",
        "model.depth",
        "data",
        "extra",
        "optimizer.lr",
        "schedule",
        "batch",
        "axes",
        "probes.clean",
    )
    keys += ("objective.threat.eps", "objective.attack", "validate.attack.steps", "a.b.c", ".", "eps", "augment.scale")
    given = []
    for _ in range(draw.choice((1, 1, 2, 5))):
        value = draw.choice((*YAML_PIECES, *map(_short, VALUES), "[1, 2]", "{name: pgd}", "null"))
        given.append(f"{draw.choice(keys)}{draw.choice('==== :')}{value}")
    given = [mutate_text(each, draw) if draw.random() < 0.3 else each for each in given]
    if draw.random() < 0.5:
        build_objective(load_recipe("tiny/demo-robust", given))
    else:
        for case in load_suite("demo", given).cases()[:10]:
            build_case(case)


def _short(value: Any) -> str:
    with contextlib.suppress(ValueError):
        return str(value)[:5000]
    return "9" * 5000


@kind
def commands(samples: Samples, draw: random.Random) -> None:
    """As typed, with what takes long or goes to the network left out."""
    verbs = ("train", "measure", "compare", "report", "leaderboard", "show", "list", "import", "data", "schema")
    words = [
        "tiny/demo-robust",
        "zoo/cifar10-linf-vit",
        "card",
        "run",
        "recipe.yaml",
        "w.pth",
        "pictures",
        "demo",
        "attacks",
    ]
    words += [
        "--set",
        "--run",
        "--suite",
        "--data",
        "--limit",
        "--eps",
        "--attack",
        "--seed",
        "--workers",
        "-o",
        "--model",
    ]
    words += [
        "seed=1",
        "model=x",
        "8/255",
        "0",
        "-1",
        "1e9",
        "npz:path=a.npz",
        "imagefolder:root=pictures",
        "verify",
        "cifar10",
    ]
    words += [
        "--shard",
        "1/2",
        "--until",
        "0.1",
        "--keep",
        "all",
        "--normalize",
        "none",
        "vit/micro",
        "--resume",
        "",
        "--",
    ]
    chosen = [draw.choice(verbs) if draw.random() < 0.95 else "fly"]
    for _ in range(draw.randrange(7)):
        word = draw.choice(words) if draw.random() < 0.8 else _short(draw.choice(VALUES))
        chosen.append(word.replace("\0", ""))
    with contextlib.chdir(samples.folder / "work"):
        _typed(chosen)


def _typed(words: list[str]) -> None:
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["bastion", *words]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    said = out.getvalue() + err.getvalue()
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("warning: ")]
    if printable(said) != said or (code == 1 and (len(lines) != 1 or not lines[0].startswith("error: "))):
        raise NotOneLine(f"{words}: code {code}: {said[-300:]!r}")
    if code not in (0, 1, 2, None):
        raise NotOneLine(f"{words}: code {code}")


@kind
def networks(samples: Samples, draw: random.Random) -> None:
    """Options of models, as a recipe or `show` may give them."""
    specs: list[dict[str, Any]] = [
        SPEC,
        {"name": "vit/micro", "depth": 2, "img_size": 32, "num_classes": 10, "in_chans": 3},
        {"name": "resnet/micro", "widths": [4, 8], "depths": [1, 1]},
        {"name": "timm/vit_tiny_patch16_224", "depth": 1, "img_size": 32, "patch_size": 16, "embed_dim": 48},
    ]
    spec = _mapping(mutate_structure(draw.choice(specs), draw))
    checkpoint.build_backbone({key: value for key, value in spec.items() if isinstance(key, str)})


@kind
def cards(samples: Samples, draw: random.Random) -> None:
    folder = samples.folder / "work" / "card"
    good = (folder / "card.json").read_bytes()
    try:
        if draw.random() < 0.2:
            (folder / "card.json").write_bytes(mutate_bytes(good, draw))
        else:
            content = {key: value for key, value in json.loads(good).items() if key not in ("sha256", "format")}
            storage.write_json(folder / "card.json", _mapping(mutate_structure(content, draw)))
        load(folder)
    finally:
        (folder / "card.json").write_bytes(good)


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {"content": content}


@kind
def checkpoints(samples: Samples, draw: random.Random) -> None:
    _, content = samples.files["checkpoints"][0]
    if draw.random() < 0.5:
        state = mutate_structure({"of": {}, "step": 3, "model": {"w": 1.0}, "betas": [0.9, 0.99], "best": None}, draw)
        try:
            write_state(samples.folder / "case" / "step.safetensors", state)
        except (TypeError, ValueError) as error:
            raise BastionError("no training would store this") from error
        read_state(samples.folder / "case" / "step.safetensors")
    else:
        read_state(samples.fresh("step.safetensors", mutate_bytes(content, draw)))


@kind
def imports(samples: Samples, draw: random.Random) -> None:
    name, content = draw.choice(samples.files["imports"])
    path = samples.fresh(name, mutate_bytes(content, draw))
    import_checkpoint.import_file(path, SPEC, normalize="none", match=draw.choice(("name", "order")))


@kind
def pictures(samples: Samples, draw: random.Random) -> None:
    name, content = draw.choice(samples.files["pictures"])
    folder = samples.folder / "case" / "pictures" / "a"
    samples.fresh(f"pictures/a/{name}", mutate_bytes(content, draw))
    try:
        listing = list_pictures(folder.parent)
        FolderSplit(listing, lambda picture: torch.from_numpy(np.array(picture.resize((4, 4)))).permute(2, 0, 1)).batch(
            [0]
        )
    finally:
        (folder / name).unlink()


@kind
def archives(samples: Samples, draw: random.Random) -> None:
    name, content = draw.choice(samples.files["archives"])
    if draw.random() < 0.3 and name == "a.npz":
        path = samples.fresh(name, _odd_npz(draw))
    else:
        path = samples.fresh(name, mutate_bytes(content, draw))
    if name.endswith(".npz"):
        npz(str(path))
    elif name.endswith(".tar.gz"):
        cifar.read_cifar10(path)
    elif name.endswith(".pickle"):
        cifar._unpickled_batch(path.read_bytes(), b"labels", str(path))
    else:
        idx._read_idx(path)


def _odd_npz(draw: random.Random) -> bytes:
    """Whole, but what its arrays say of themselves is not true, or absurd."""
    file = io.BytesIO()
    sides = [draw.choice((0, 1, 2, 32, 3, -1, 10**6, 10**12, 2**63)) for _ in range(draw.randrange(6))]
    kind_ = draw.choice(("|u1", "<f8", "|O", "<i8", "<c16", "|S5", "<M8[s]", "|V7"))
    header = str({"descr": kind_, "fortran_order": draw.random() < 0.5, "shape": tuple(sides)})
    with zipfile.ZipFile(file, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for part in draw.choice((("image", "label"), ("image",), ("label", "image", "x"))):
            text = header.ljust(117) + "\n"
            payload = bytes(draw.choice((0, 10, 3 * 32 * 32 * 2)))
            archive.writestr(
                f"{part}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + payload
            )
    return file.getvalue()


@kind
def downloads(samples: Samples, draw: random.Random) -> None:
    """Answers of a server, byte for byte."""
    body = draw.randbytes(draw.choice((0, 10, 10_000)))
    head = f"HTTP/1.1 {draw.choice((200, 200, 206, 204, 301, 404, 416, 999))} OK\r\nContent-Length: {len(body)}\r\n"
    head += draw.choice(("", f"Content-Range: bytes 0-{len(body)}/{len(body)}\r\n", "Transfer-Encoding: chunked\r\n"))
    answers = [mutate_bytes(head.encode() + b"\r\n" + body, draw) for _ in range(3)]
    part = samples.folder / "case" / "downloaded"

    def answer(*_: Any, **__: Any) -> HTTPResponse:
        return _answer(answers.pop() if answers else b"")

    try:
        with mock.patch.object(download, "urlopen", answer):
            download.download("http://localhost/file", part, md5=None)
    finally:
        for path in (part, download.part_of(part)):
            path.unlink(missing_ok=True)


class _Socket:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self.content)


def _answer(content: bytes) -> HTTPResponse:
    response = HTTPResponse(_Socket(content))  # type: ignore[arg-type]
    response.begin()
    response.url = "http://localhost/file"  # type: ignore[attr-defined]
    return response


@kind
def runs(samples: Samples, draw: random.Random) -> None:
    """Logs, measurements and facts of somebody else's run."""
    folder = samples.folder / "work" / "run"
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".safetensors")
    )
    path = draw.choice(files)
    good = path.read_bytes()
    try:
        if path.suffix == ".json" and draw.random() < 0.7:
            content = {key: value for key, value in json.loads(good).items() if key not in ("sha256", "format")}
            storage.write_json(path, _mapping(mutate_structure(content, draw)))
        elif path.suffix == ".jsonl" and draw.random() < 0.7:
            (folder / "provenance.json").rename(folder / "provenance")  # without its id no line has a checksum
            lines = [json.dumps(mutate_structure(json.loads(line), draw)) for line in good.decode().splitlines()]
            path.write_text("\n".join(lines))
        else:
            path.write_bytes(mutate_bytes(good, draw))
        run = create_run(folder, 0) if (folder / "provenance.json").exists() else Run(folder)
        run.history()
        run.card()
        for facts in read_measurements(run):
            facts.table()
        if draw.random() < 0.2 and run.exists():
            report(folder, samples.folder / "case" / "report.html")
    finally:
        path.write_bytes(good)
        if (folder / "provenance").exists():
            (folder / "provenance").rename(folder / "provenance.json")


def make_samples(folder: Path) -> Samples:
    """One good file of each kind."""
    samples = Samples(folder)
    work = folder / "work"
    work.mkdir(parents=True)
    (folder / "case").mkdir()
    shipped = [SHIPPED / "tiny", SHIPPED / "base", SHIPPED / "suites"]
    samples.texts["recipes"] = [
        path.read_text() for path in sorted((*shipped[0].glob("*.yaml"), *shipped[1].glob("*.yaml")))
    ]
    samples.texts["recipes"].append(yaml.safe_dump(load_recipe("tiny/demo-robust").resolved(), sort_keys=False))
    samples.texts["suites"] = [path.read_text() for path in sorted(shipped[2].glob("*.yaml"))]
    model = checkpoint.build(SPEC, mean=(0.5,) * 3, std=(0.2,) * 3, shape=(3, 32, 32))
    checkpoint.save(model, work / "card")
    (work / "recipe.yaml").write_text(samples.texts["recipes"][0])
    weights = model.network.state_dict()
    write_state(work / "step.safetensors", {"of": {"recipe": "x"}, "step": 3, "model": weights, "best": 0.5})
    samples.files["checkpoints"] = [("step.safetensors", (work / "step.safetensors").read_bytes())]
    torch.save({"state_dict": weights, "epoch": 3}, work / "w.pth")
    torch.save(weights, work / "old.pth", _use_new_zipfile_serialization=False)
    state = next((work / "card").glob("*.safetensors"))
    sources = {"w.pth": work / "w.pth", "old.pth": work / "old.pth", "w.safetensors": state}
    samples.files["imports"] = [(name, path.read_bytes()) for name, path in sources.items()]
    samples.files["pictures"] = list(_pictures(work / "pictures"))
    samples.files["archives"] = list(_archives(work))
    _run(work / "run")
    return samples


def _pictures(folder: Path) -> Iterator[tuple[str, bytes]]:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8))
    for number, suffix in enumerate(("jpg", "png", "webp", "bmp", "ppm", "tif", "gif")):
        path = folder / str(number % 2) / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        yield path.name, path.read_bytes()


def _archives(folder: Path) -> Iterator[tuple[str, bytes]]:
    images, labels = np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1])
    np.savez_compressed(folder / "a.npz", image=images, label=labels)
    yield "a.npz", (folder / "a.npz").read_bytes()
    batch = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}, protocol=2)
    yield "batch.pickle", batch
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in cifar._PICKLED:
            member = tarfile.TarInfo(name)
            member.size = len(batch)
            tar.addfile(member, io.BytesIO(batch))
    yield "cifar.tar.gz", file.getvalue()
    yield "idx3-ubyte", bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2, *range(8)])
    yield "idx3-ubyte.gz", gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 8, *range(8)]))


def _run(folder: Path) -> None:
    run = create_run(folder, 0)
    for step in range(3):
        run.log({"kind": "step", "step": step, "epoch": step / 2, "loss": 1.0})
    run.log({"kind": "event", "step": 3, "message": "resumed"})
    store, n = FactStore(run.facts / "identity" / "0"), 6
    columns = {"index": np.arange(n), "label": np.arange(n) % 2, "correct": np.arange(n) > 2}
    store.write(range(n), columns, {}, {"device": "cpu"})
    case = MeasuredCase(
        label="clean",
        kind="probes",
        role="clean",
        store=store.name,
        n=n,
        spec={"name": "accuracy"},
        columns=tuple(columns),
    )
    about = {
        "model": "m",
        "weights": "5eed",
        "data": {"name": "tiny", "split": "test", "fingerprint": "f"},
        "classes": ("a", "b"),
        "suite": "demo",
    }
    write_measurement(run, Measurement(**environment(0), **about, n=n, cases=(case,)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing trains, measures, or asks the network."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise BastionError("not in a fuzzer")

    places = ((trainer.Trainer, "fit"), (runner, "_execute"), (acquire, "run"), (download, "urlopen"))
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, refuse))
        warnings.simplefilter("ignore")
        yield


def run_case(name: str, number: int, seed: int, samples: Samples) -> str:
    """`passed` or `refused`; anything else is a finding."""
    draw, began = random.Random(f"{seed} {name} {number}"), time.process_time()
    try:
        KINDS[name](samples, draw)
        result = "passed"
    except BastionError as error:
        result = "refused" if str(error) and printable(str(error)) == str(error) else f"message {error!r}"
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
    seconds = time.process_time() - began
    return result if seconds < SECONDS else f"took {seconds:.0f} s ({result[:200]})"


def fuzz(jobs: list[tuple[str, int]], seed: int, samples: Samples) -> Generator[tuple[str, int, str]]:
    """Each case with its result, from processes that may die."""
    while jobs:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _limit_memory()
            with os.fdopen(writing, "w", buffering=1) as pipe:
                for name, number in jobs:
                    pipe.write(json.dumps(run_case(name, number, seed, samples)) + "\n")
            os._exit(0)
        os.close(writing)
        done, status = 0, 0
        try:
            with os.fdopen(reading) as pipe:
                while done < len(jobs):
                    ready = select.select([pipe], [], [], PATIENCE)[0]
                    line = pipe.readline() if ready else ""
                    if not line:
                        break
                    yield (*jobs[done], json.loads(line))
                    done += 1
        finally:  # also if no more results are wanted
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        if done < len(jobs):
            died = f"died: {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) and ready else "hung"
            yield (*jobs[done], died)
        jobs = jobs[done + 1 :]


def _limit_memory() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutated input: no tracebacks, no hangs, bounded memory.")
    parser.add_argument("--count", type=int, default=1000, help="cases in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--only", choices=sorted(KINDS), action="append", help="these kinds alone")
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--results", type=Path, help="default: torture/fuzz-SEED.jsonl; cases in it are not run again")
    options = parser.parse_args()
    record = Record(options.results or Path("torture") / f"fuzz-{options.seed}.jsonl")
    began = time.monotonic()
    names = options.only or list(KINDS)
    with tempfile.TemporaryDirectory() as folder, quiet():
        samples = make_samples(Path(folder))
        jobs = [(names[turn % len(names)], options.first + turn // len(names)) for turn in range(options.count)]
        if options.only is None:
            jobs = [(name, number) for name, number in jobs if f"{name} {number}" not in record.results]
        results = fuzz(jobs, options.seed, samples)
        for name, number, result in results:
            record.add(f"{name} {number}", result)
            if result not in ("passed", "refused"):
                print(f"--only {name} --first {number} --count 1 --seed {options.seed}: {result}", flush=True)
            if time.monotonic() - began > 60 * options.minutes:
                results.close()
                break
    counts: Counter[tuple[str, str]] = Counter()
    for case, result in record.results.items():
        counts[case.split()[0], result if result in ("passed", "refused") else "findings"] += 1
    print(f"{'':<12}{'passed':>9}{'refused':>9}{'findings':>9}")
    for name in [*names, "all"]:
        row = [
            sum(counts[each, what] for each in (names if name == "all" else [name]))
            for what in ("passed", "refused", "findings")
        ]
        print(f"{name:<12}" + "".join(f"{count:>9,}" for count in row))
    return int(any(what == "findings" and count for (_, what), count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
