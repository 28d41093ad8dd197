"""The pages of the documentation site that are made from the code: a hook of mkdocs (see mkdocs.yml).

README becomes the home page, a notebook a page; attacks, probes, recipe keys and commands are told by what
`bastion show` and `--help` use. Nothing of it is written into the repository.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bastion.listing import KINDS, listed
from bastion.recipe_yaml import dump

ROOT = Path(__file__).parents[1]
COPIES = {"index.md": "README.md", "changes.md": "CHANGELOG.md"}  # pages that GitHub shows elsewhere
NOTEBOOKS = {"notebooks/first-steps.md": "docs/notebooks/first-steps.ipynb"}
FENCE = re.compile(r"^```(\w+) +(\S+)$", re.M)  # ```yaml suite.yaml
RESULTS = (
    "bastion.measuring.evaluate.AdversarialExamples",
    "bastion.measuring.facts.Facts",
    "bastion.measuring.compare.Comparison",
    "bastion.run.Run",
    "bastion.models.Classifier",
)
GUIDES = {
    "attacks": ("Attacks", "How they run, and how they compare with others: [attacks](../attacks.md)."),
    "objectives": ("Objectives", "How to use them: [training](../training.md)."),
    "probes": ("Probes", "How they are put together: [suites](../suites.md)."),
    "studies": ("Studies", "How they are put together: [suites](../suites.md)."),
    "data": ("Data sets", "How to get them, and folders of your own: [data](../data.md)."),
    "loggers": ("Loggers", "How to use them: [loggers](../training.md#loggers)."),
}  # of kinds of plug-ins: the page's title, and where the text is
COMPAT = ("AutoAttack", "benchmark")
CONTRACTS = (
    "Batch", "Attack", "Objective", "Prepared", "Losses", "TrainingContext", "Probe", "Description", "Study", "Logger",
    "Block", "Taps", "Split", "DataSet",
)  # fmt: skip


def python_page() -> str:
    """What `import bastion` gives."""
    import bastion
    from bastion import attacks

    lines = ["# Python", "", "Pixels in [0, 1] go into a model, logits come out, and `eps` is in the same units.", ""]
    lines += ["## bastion", "", *_documented("bastion", sorted(bastion.__all__, key=str.lower))]
    lines += ["## What the calls return", "", *(f"::: {name}\n" for name in RESULTS)]
    about = "The class of every [attack](attacks.md) can be imported from here too: `from bastion.attacks import PGD`."
    lines += ["## bastion.attacks", "", about, "", "`attacks.build` makes an attack of a name or `{name: …}`.", ""]
    lines += _documented("bastion.attacks", [name for name in attacks.__all__ if name != "attacks"])
    lines += ["## bastion.compat", "", "For scripts of [AutoAttack and RobustBench](../coming-from.md).", ""]
    lines += _documented("bastion.compat", COMPAT)
    return "\n".join(lines)


def contracts_page() -> str:
    """What plug-ins are made of."""
    about = (
        "What crosses a boundary, and what a plug-in must do. [Extending bastion](../extend.md) has an example of each."
    )
    complete = '    options: {show_if_no_docstring: true, filters: ["!^_(?!_call__)"]}\n'
    parts = [f"{part}{complete}" for part in _documented("bastion.types", CONTRACTS)]
    return "\n".join(["# Contracts", "", about, "", *parts])


def _documented(module: str, names: Iterable[str]) -> list[str]:
    return [f"::: {module}.{name}\n" for name in names]


def plugins_page(kind: str) -> str:
    """All plug-ins of a kind: what each is, its settings, what it tells, how it is used."""
    title, guide = GUIDES[kind]
    about = f"{title}: {KINDS[kind].about}. {guide} `bastion show NAME` tells the same on the command line."
    lines = [f"# {title}", "", about, ""]
    for name, *_ in listed(kind):
        lines += [f"## {name}", "", *_plugin(kind, name)]
    return "\n".join(lines)


def _plugin(kind: str, name: str) -> Iterator[str]:
    from bastion.show import plugin

    told = plugin(kind, name)
    yield from (told.about, "")
    yield from settings_table(told.settings) if told.settings else ("It has no settings.",)
    if told.facts:
        yield from ("", *table(("fact", "what it tells"), ((f"`{each}`", text) for each, text in told.facts.items())))
    yield from ("", "```text", *told.use, "```", "")


def settings_table(settings: Iterable[Any]) -> list[str]:
    """Name, default, and kind with help, as in `bastion show`."""
    rows = (
        (f"`{each.name}`", f"`{each.default}`" if each.default else "required", "; ".join(filter(None, each[2:])))
        for each in settings
    )
    return table(("setting", "default", "what it is"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """In Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def models_page() -> str:
    """The options of every architecture; docs/models.md has what is counted of them."""
    from bastion.models import models
    from bastion.settings_text import settings_of

    rows = []
    for name in models.names():
        known = [
            f"{each.name}={each.default}" if each.default else each.name for each in settings_of(models.factory(name))
        ]
        rows.append((f"`{name}`", ", ".join(f"`{each}`" for each in known)))
    about = "Every model and its options, with defaults. A recipe says `model: {name: xcit/s12, img_size: 32}`."
    more = "[Models](../models.md) says what they mean, and counts parameters and multiply-accumulates."
    return "\n".join(["# Options of models", "", about, more, "", *table(("model", "options"), rows), ""])


def recipe_page() -> str:
    from bastion.recipe import Recipe

    about = (
        "Every key of a recipe. `--set optimizer.lr=1e-4` changes one on the command line, `extends: NAME` puts a file "
        "on top of another. `bastion show RECIPE` prints a recipe with all of them, and `bastion schema` writes a JSON "
        "schema by which editors complete and check recipes."
    )
    return "\n".join(["# Recipe keys", "", about, "", *_keys(Recipe)])


def suite_page() -> str:
    from bastion.suite import Suite

    about = (
        "Every key of a suite, then the suites that ship. [Suites](../suites.md) says how the keys work together. "
        "Beside its own settings a probe may have `role` and `data`."
    )
    lines = ["# Suite keys", "", about, "", *_keys(Suite), "## Suites that ship", ""]
    for name, *_ in listed("suites"):
        lines += [f"### {name}", "", *_suite(name)]
    return "\n".join(lines)


def _keys(model: Any) -> Iterator[str]:
    from bastion.settings_text import keys_of

    for section in keys_of(model):
        if section.path:
            yield from (f"## {section.path}", "")
        if section.about:
            yield from (section.about, "")
        yield from (*settings_table(section.settings), "")


def _suite(name: str) -> Iterator[str]:
    from bastion.suite import load_suite

    content = load_suite(name).resolved()
    yield from (content.pop("about").strip(), "", "```yaml", dump(content, fractions=True).strip(), "```", "")


def cli_page() -> str:
    """From what `--help` is made of."""
    from typer.main import get_command

    from bastion.cli import app

    lines = ["# Command line", "", "`bastion --install-completion` makes your shell complete names.", ""]
    for words, command in _commands("bastion", get_command(app)):
        lines += [f"## {words}", "", command.help, "", *_parameters(words, command)]
    return "\n".join(lines)


def _commands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield words, command
    for name in sorted(below):
        yield from _commands(f"{words} {name}", below[name])


def _parameters(words: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    names = [f"{each.metavar}{'…' if each.nargs == -1 else ''}" for each in arguments]
    usage = [name if each.required else f"[{name}]" for each, name in zip(arguments, names, strict=True)]
    yield from ("```text", " ".join([words, *usage, *(["[OPTIONS]"] if options else [])]), "```", "")
    rows = [*((f"`{each.metavar}`", each.help) for each in arguments), *map(_option, options)]
    yield from (*table(("", "what it is"), rows), "")


def _option(option: Any) -> tuple[str, str]:
    name = f"{', '.join([*option.opts, *option.secondary_opts])} {option.metavar or ''}".strip()
    plain = option.default not in (None, True, False) and "efault:" not in option.help
    note = " Required." if option.required else f" Default: `{option.default}`." if plain else ""
    return f"`{name}`", option.help + note


PAGES: dict[str, Callable[[], str]] = {
    "reference/python.md": python_page,
    "reference/contracts.md": contracts_page,
    "reference/cli.md": cli_page,
    **{f"reference/{kind}.md": lambda kind=kind: plugins_page(kind) for kind in GUIDES},
    "reference/models.md": models_page,
    "reference/recipes.md": recipe_page,
    "reference/suites.md": suite_page,
}


def copied(name: str) -> str:
    """A file of the repository's root, as a page: its links are those of a page in docs/."""
    alone = "---\nhide: [navigation]\n---\n" if name == COPIES["index.md"] else ""
    return alone + (ROOT / name).read_text().replace("](docs/", "](")


def notebook(page: str, path: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook as a page, and the pictures in it."""
    parts = [f"[This page as a notebook]({path.name})"]
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{Path(page).stem}-{number}.png"
                yield str(Path(page).with_name(picture)), base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{''.join(data.get('text/plain', ''))}]({picture})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    title, *rest = parts[1:]
    yield page, "\n\n".join([title, parts[0], *rest]) + "\n"


def on_config(config: Any) -> Any:
    """Headings have the anchors that GitHub gives them."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    made: dict[str, str | bytes] = {path: copied(name) for path, name in COPIES.items()}
    for page, path in NOTEBOOKS.items():
        made.update(notebook(page, ROOT / path))
    made.update({path: page() for path, page in PAGES.items()})
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The name of a block's file is its title; a link to a notebook is one to its page."""
    if page.file.src_uri not in NOTEBOOKS:
        markdown = markdown.replace(".ipynb)", ".md)")
    return FENCE.sub(r'```\1 title="\2"', markdown)
