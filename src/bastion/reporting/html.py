"""One self-contained HTML page about one or more runs. No torch, no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bastion import recipe_yaml, storage
from bastion.reporting import plots, tables
from bastion.reporting.gallery import galleries
from bastion.reporting.tables import Comparison, Subject

_WIDE, _NARROW = 760, 350  # a chart is drawn once for a desk and once for a phone


def report(runs: str | Path | Sequence[str | Path], output: str | Path) -> Path:
    """Write the page about one or more run directories to `output`. The same facts give the same bytes."""
    page = render(tables.read_subjects([runs] if isinstance(runs, str | Path) else runs))
    storage.write_text(Path(output), page)
    return Path(output)


def render(subjects: Sequence[Subject]) -> str:
    comparisons = tables.compare(subjects)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            subjects=subjects,
            comparisons=comparisons,
            summary=tables.summary(comparisons),
            unmeasured=[subject for subject in subjects if not subject.measurements],
            untrained=[subject for subject in subjects if not subject.records("step") + subject.records("epoch")],
            charts=[_charts(comparison, position) for position, comparison in enumerate(comparisons)],
            panels=plots.training_panels(subjects),
            galleries=[(subject, galleries(subject)) for subject in subjects],
            details=[_details(subject) for subject in subjects],
        )
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bastion.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": tables.percent,
        "interval": tables.interval,
        "quantity": tables.quantity,
        "sign": lambda mark: plots.MARKERS[plots.marker(mark)],
        "colour": lambda mark: f"var(--run-{mark % plots.COLOURS})",
    }
    return environment


def _charts(comparison: Comparison, position: int) -> dict[str, Markup]:
    """None for a suite that asks for no accuracy."""
    widths = {"wide": _WIDE, "narrow": _NARROW} if comparison.columns else {}
    return {
        name: plots.accuracy_chart(comparison, width, f"accuracy-{position}-{name}") for name, width in widths.items()
    }


def _details(subject: Subject) -> dict[str, Any]:
    """What a reader needs to believe the numbers, or to make them again."""
    resolved = subject.run.recipe()
    return {
        "subject": subject,
        "recipe": None if resolved is None else recipe_yaml.dump(resolved),
        "origins": [("Run", _origin(subject.run.provenance()))]
        + [(_measured(facts.about), _origin(facts.about)) for facts in subject.measurements],
        "described": list(
            dict.fromkeys(pair for facts in subject.measurements for pair in facts.about["described"].items())
        ),
        "events": subject.records("event"),
    }


def _measured(about: dict[str, Any]) -> str:
    return f"Suite {about['suite']} on {about['n']} images of {about['data']['name']} ({about['split']})"


def _origin(about: dict[str, Any]) -> dict[str, str]:
    """Of a provenance or a measurement; older ones may lack some of it."""
    lists = {key: about.get(key, {}) for key in ("machine", "versions")}
    return {
        "date": str(about.get("created", "unknown")),
        "command": str(about.get("command", "unknown")),
        "seed": str(about.get("seed", "unknown")),
        **{key: ", ".join(f"{name} {value}" for name, value in pairs.items()) for key, pairs in lists.items()},
    }
