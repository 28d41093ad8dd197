"""The command line: verbs and few flags. Settings of a run are in its recipe; `--set` overrides one value."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from bastion.errors import BastionError, Interrupted, did_you_mean, printable
from bastion.listing import KINDS, listed
from bastion.progress import SafeConsole
from bastion.progress import console as stderr


class Command(TyperCommand):
    """A command whose help shows no type for flags, as they take no value."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))


# What people try first: the command that does it.
OTHER_COMMANDS = {
    **dict.fromkeys(
        ("attack", "eval", "evaluate", "test", "benchmark"), "measure MODEL --attack autoattack --eps 8/255"
    ),
    "help": "--help",
    "version": "--version",
}


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in OTHER_COMMANDS and args[0] not in self.commands:
            ctx.fail(f"No such command '{args[0]}'. Did you mean 'bastion {OTHER_COMMANDS[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _printable_errors():
            return super().invoke(ctx)


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Words that were typed are part of the errors of the command line."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message)  # type: ignore[attr-defined]
        raise


def _plain_flags(parameters: Any) -> Any:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


app = typer.Typer(
    help="Train, attack and explain robust image classifiers.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Get, check and augment data sets.", cls=Group, no_args_is_help=True)
app.add_typer(data_app, name="data")
stdout = SafeConsole(highlight=False)


def _say(text: str | Text, to: Console | None = None) -> None:
    (to or stdout).print(text, soft_wrap=True, markup=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from bastion.run import version

        _say(f"bastion {version('bastion')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train, attack and explain robust image classifiers."""


def _names(*kinds: str) -> Callable[[str], list[str]]:
    """Return a shell completion over the names of these kinds."""

    def complete(incomplete: str) -> list[str]:
        rows = (row for kind in kinds for row in KINDS[kind].rows("*"))
        return [row[0] for row in rows if row[0].startswith(incomplete)]

    return complete


Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N. Default: a GPU if there is one.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. optimizer.lr=1e-3; repeatable."),
]


@app.command(cls=Command)
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=_names("recipes"),
            help="A shipped recipe (see `bastion list recipes`) or a .yaml file.",
        ),
    ],
    change: Changes = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same as --set seed=N.")] = None,
    device: Device = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--dir",
            metavar="FOLDER",
            help="Run directory (`--dir` under torchrun). Default: runs/NAME-HASH.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint.")] = False,
) -> None:
    """Train a recipe."""
    from bastion.recipe import load_recipe

    changes = [*(change or ()), *([] if seed is None else [f"seed={seed}"])]
    load_recipe(recipe, changes)  # report typos before torch is imported
    from bastion.memory import keep_freed_memory
    from bastion.training.trainer import train as train_recipe

    keep_freed_memory()
    finished = train_recipe(recipe, changes=changes, folder=run, resume=resume, device=device)
    if os.environ.get("RANK", "0") != "0":  # only the first process prints
        return
    _say(f"trained: {finished.folder}\nnext: bastion measure {finished.folder} --suite demo")


STOP, RUNNING = "How many examples", "How it runs"  # panels of the help


@app.command(cls=Command)
def measure(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=_names("zoo"),
            help="A run, a model folder, zoo/NAME, timm/NAME with its weights, or path.py:function of your own.",
        ),
    ],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTACK",
            autocompletion=_names("attacks"),
            help="An attack (see `bastion list attacks`), after clean accuracy and before checks; settings as "
            "NAME:key=value,key=value; repeatable.",
        ),
    ] = None,
    norm: Annotated[
        str | None, typer.Option(metavar="NORM", help="With --attack: linf, l2 or l1. Default: linf.")
    ] = None,
    eps: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EPS", help="Radius, e.g. 8/255; repeat it for a curve. Default with --attack and linf: 8/255."
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="SUITE",
            autocompletion=_names("suites", "studies", "probes"),
            help="Instead of --attack: a shipped suite (see `bastion list suites`), a .yaml file, or the name of one "
            "study or probe. Default: demo.",
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            autocompletion=_names("data"),
            help="A folder of class folders, or a data set; parameters as NAME:key=value,key=value, e.g. "
            "imagefolder:root=/data/imagenette,size=160.",
        ),
    ] = "cifar10-mini",
    split: Annotated[str, typer.Option(metavar="SPLIT", help="train, val or test.")] = "test",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the suite, e.g. eps=4/255; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all random draws.")] = 0,
    device: Device = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--dir",
            metavar="FOLDER",
            help="Where facts go (`--dir` under torchrun). Default: the model's own run, or runs/.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first N examples.", rich_help_panel=STOP)
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            metavar="WIDTH",
            help="Stop when the 95 % interval of every accuracy is no wider, e.g. 0.02; random order.",
            rich_help_panel=STOP,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Stop after this many minutes; random order.", rich_help_panel=STOP),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Only the I-th of N parts, for jobs that share one --run.", rich_help_panel=STOP
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes of one thread each. Default: one per GPU, or per core it may use.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Examples that are measured and stored together.", rich_help_panel=RUNNING)
    ] = 128,
    keep: Annotated[
        str,
        typer.Option(metavar="N", help="Keep pictures of the first N examples, or of `all`.", rich_help_panel=RUNNING),
    ] = "16",
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Keep all adversarial examples, and write them to a .npz file or as PNG to a folder.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    acceleration: Annotated[
        bool,
        typer.Option(
            help="Let attacks run a cheaper copy of the model; verdicts are always of the model itself.",
            rich_help_panel=RUNNING,
        ),
    ] = True,
) -> None:
    """Measure a model with a suite of probes. Re-run the same command to resume."""
    from bastion.measuring.runner import measure as measure_model
    from bastion.measuring.runner import measure_shard
    from bastion.measuring.table import until_the_end
    from bastion.memory import keep_freed_memory

    keep_freed_memory()
    wanted, changes = _wanted_suite(suite, attack or [], norm, eps or [], change or [])
    how: dict[str, Any] = {"workers": workers, "batch_size": batch_size, "acceleration": acceleration}
    how |= {"changes": changes, "split": split, "seed": seed, "folder": run, "limit": limit, "budget": budget}
    how["device"] = device
    how["keep"] = "all" if export else int(keep) if keep.isdecimal() else keep
    if shard and until is not None:
        raise BastionError("measure: --until looks at all examples, --shard at some of them; use one of the two")
    if shard and export:
        raise BastionError("measure: --export writes the examples of all shards; give it without --shard, after them")
    if shard is None:
        facts = measure_model(model, data, wanted, until=until, **how)
        if os.environ.get("RANK", "0") == "0":  # only the first process prints
            _say(notes_in_yellow(facts.table()))
            if until is not None and (note := until_the_end(facts, until)):
                _say(f"note: {note}")
            where = facts.run.folder
            _say(f"facts: {where}; a page about them: bastion report {where}")
            if export:
                facts.export(export)
                _say(f"adversarial examples: {export}")
        return
    _say(str(measure_shard(model, data, wanted, shard=shard, **how)))


def _wanted_suite(
    suite: str | None, attacks: list[str], norm: str | None, eps: list[str], changes: list[str]
) -> tuple[Any, list[str]]:
    """Return the suite, made of the attacks if there are any, and the changes to it."""
    eps = [each for text in eps for each in text.split(",")]  # `--eps 2/255,8/255` too
    if not attacks:
        if norm is not None:
            raise BastionError(
                "measure: --norm goes with --attack; a suite has its own norm, such as --suite autoattack-l2"
            )
        return suite or "demo", [*changes, *([f"eps=[{','.join(eps)}]"] if eps else [])]
    if suite is not None:
        raise BastionError("measure: --attack makes a suite of its own; give it or --suite, not both")
    from bastion.measuring.evaluate import attack_suite, radii

    return attack_suite(attacks, norm or "linf", radii(eps or None, norm or "linf")), changes  # type: ignore[arg-type]


@app.command(cls=Command)
def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Measured runs, model folders or zoo/NAME; the reference first."),
    ],
    suite: Annotated[
        str | None, typer.Option(metavar="SUITE", help="Which suite, if they were measured with several.")
    ] = None,
) -> None:
    """Compare measured models on the same examples: differences with intervals, and what changed each way."""
    from bastion.measuring.compare import compare as compare_models

    _say(notes_in_yellow(compare_models(*models, suite=suite).table()))


@app.command(cls=Command)
def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs, or what was measured: zoo/NAME, timm/NAME, a model folder."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The HTML file.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one self-contained HTML page about one or more runs."""
    from bastion.reporting.html import report as write_report

    _say(f"report: {write_report(runs, output)}")


@app.command(cls=Command)
def leaderboard(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are; all below it are read.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The HTML file.")] = Path(
        "leaderboard.html"
    ),
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all numbers to this file.")] = None,
    robustbench: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write RobustBench's JSON files of model information to this folder."),
    ] = None,
    published: Annotated[
        Path | None, typer.Option(help="Also show the models of this folder of RobustBench's JSON files, marked.")
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Draw numbers over a setting of the recipes, e.g. optimizer.l1."),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="Pair models whose names differ by this word, e.g. convstem."),
    ] = None,
) -> None:
    """Write one self-contained HTML page about all measured models below a folder."""
    from bastion.reporting.leaderboard import leaderboard as write_leaderboard
    from bastion.reporting.leaderboard_files import write_csv, write_robustbench

    boards, problems = write_leaderboard(folder, output, over=over, pair=pair, published=published)
    for problem in problems:
        _say(f"warning: left out: {problem}", stderr)
    count = sum(len(board.entries) for board in boards)
    lines = [f"leaderboard: {output} ({count} models)"]
    if csv:
        write_csv(boards, csv)
        lines.append(f"csv: {csv}")
    if robustbench:
        lines.append(f"robustbench: {len(write_robustbench(boards, robustbench))} files in {robustbench}")
    _say("\n".join(lines))


@app.command(cls=Command)
def show(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=_names("attacks", "data", "models", "objectives", "probes", "recipes", "studies", "suites"),
            help="Whatever `bastion list` names, a run, a model folder, or a .yaml file.",
        ),
    ],
    change: Changes = None,
    timed: Annotated[
        bool,
        typer.Option("--time", help="Run a recipe's first steps and estimate its time on this machine."),
    ] = False,
) -> None:
    """Show what something is: an attack's settings, a suite's probes, a recipe and its cost, a model, a run."""
    from bastion import show as display

    _say(display.describe(target, tuple(change or ()), timed=timed))


@app.command("list", cls=Command)
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            autocompletion=lambda incomplete: [each for each in KINDS if each.startswith(incomplete)],
            help=f"One of {', '.join(KINDS)}.",
        ),
    ] = None,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Only names that match, such as 'timm/vit*', or contain it.")
    ] = "*",
) -> None:
    """List names of attacks, models, recipes, … `bastion show NAME` describes one."""
    if kind is None:
        columns: tuple[str, ...] = ("kind", "about")
        rows: list[tuple[str, ...]] = [(name, each.about) for name, each in KINDS.items()]
    else:
        rows = listed(kind, pattern)
        columns = KINDS[kind].columns
    if not stdout.is_terminal:  # one line each, for other programs
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
        _say("\n".join(map(str.rstrip, lines)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        numeric = column in ("parameters", "MACs", "input")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric or number == 0)
    for name, *cells in rows:
        table.add_row(Text(name), *(Text(cell, style="dim") for cell in cells))
    stdout.print(table)


@app.command(cls=Command)
def schema(
    folder: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the two files.")
    ] = Path(),
) -> None:
    """Write recipe.schema.json and suite.schema.json, by which editors complete and check YAML."""
    from bastion import storage
    from bastion.schema import schemas

    for kind, content in schemas().items():
        path = folder / f"{kind}.schema.json"
        storage.write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        _say(f"# yaml-language-server: $schema={path}")


@app.command("import", cls=Command)
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A checkpoint of torch.save (read as weights only) or safetensors.")
    ],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model that the weights are of; see `bastion list models`.")
    ],
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the model.")
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="none, half, imagenet, mnist, cifar10, cifar10-old, cifar100, or MEAN,…/STD,…; if the file lacks it.",
        ),
    ] = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="`order`: the file names its tensors otherwise, but has them in the model's order and shapes.",
        ),
    ] = "name",
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights of a training checkpoint.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Folder for weights and card. Default: imported/NAME."),
    ] = None,
) -> None:
    """Bring a published checkpoint into bastion's format: every tensor is used, or named in the error."""
    from bastion import storage
    from bastion.models import checkpoint, import_checkpoint
    from bastion.recipe_files import parse_changes

    folder = output or Path("imported") / file.name.partition(".")[0]
    if storage.is_file(folder / checkpoint.CARD):
        raise BastionError(f"import: {folder} has a model already; give another folder with -o")
    stats = import_checkpoint.parse_stats(normalize) if normalize and "/" in normalize else normalize
    spec = {"name": model, **parse_changes(change or ())}
    done = import_checkpoint.import_file(file, spec, ema=ema, normalize=stats, match=match)
    checkpoint.save(done.model, folder, done.about(file))
    _say(f"{done}\nimported: {folder}\nnext: bastion measure {folder} --suite demo")


@data_app.command("get", cls=Command)
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set.")],
    source: Annotated[
        Path | None, typer.Option("--from", metavar="PATH", help="Take it from this file or folder, not from the net.")
    ] = None,
) -> None:
    """Fetch a data set, check it, and store it in the cache folder ($BASTION_DATA, ~/.cache/bastion)."""
    from bastion.data import acquirers, datasets

    datasets.names()  # finds the modules that know how to get data
    if name not in acquirers:
        raise BastionError(f"data get: nothing to get for '{name}'{did_you_mean(name, acquirers)}")
    _say(f"{name}: {acquirers[name](source)}")


@data_app.command("verify", cls=Command)
def data_verify(name: Annotated[str, typer.Argument(metavar="NAME", help="The data set.")]) -> None:
    """Check the stored data set against its SHA-256."""
    from bastion.data.arrays import verify

    for part, digest in verify(name).items():
        _say(f"{part:<14} {digest}")


@data_app.command("deepaugment", cls=Command)
def data_deepaugment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set; parameters as NAME:key=value,key=value.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for networks and images.")],
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N training images.")] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps of each network.")] = 600,
    edsr: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of the EDSR-like network, from another folder.")
    ] = None,
    cae: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of the CAE-like network, from another folder.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all random draws.")] = 0,
) -> None:
    """Distort the training images by two image-to-image networks (DeepAugment). Re-run the same command to resume."""
    from bastion.data import datasets
    from bastion.deepaugment.generate import deepaugment
    from bastion.recipe import named_data

    weights = {kind: path for kind, path in (("edsr", edsr), ("cae", cae)) if path}
    data = datasets.build(named_data(name))
    done = deepaugment(data, output, weights=weights, limit=limit, steps=steps, seed=seed)
    lines = [*map(str, done), "in a recipe:", "extra:"]
    lines += [f"  - data: {{name: npz, path: {each.path}, classes: {len(data.classes)}}}" for each in done]
    _say("\n".join(lines))


@app.command(cls=Command)
def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the two runs and the report.")
    ] = Path("demo"),
) -> None:
    """Train a small ViT twice, standard and adversarially, attack both, and write a report. Minutes on two cores."""
    from bastion.demo import run_demo

    _say(notes_in_yellow(run_demo(output)))


def notes_in_yellow(tables: str) -> Text:
    lines = [Text(line, "yellow" if line.startswith(("warning: ", "note: ")) else "") for line in tables.splitlines()]
    return Text("\n").join(lines)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, as errors are, without the place in the code."""
    _say(f"warning: {message}", stderr)


# In torch's words.
_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


def main() -> None:
    """Run the command line. Bad input gives one line and an exit code other than 0; a traceback is a bug."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # ASCII terminals cannot show ≤
    try:
        app()
    except Interrupted as stop:
        _say(f"stopped: {stop}", stderr)
        sys.exit(128 + stop.signal)
    except BastionError as error:
        _say(f"error: {error}", stderr)
        sys.exit(1)
    except OSError as error:  # from the system, such as a full disk
        _say(f"error: {error.filename or 'system'}: {error.strerror or error}", stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        what = " ".join(str(error).split())[:200]
        remedy = "use a smaller batch, fewer workers or smaller settings"
        _say(f"error: out of memory ({what}); {remedy}", stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
