"""One self-contained HTML page about one or more runs. No torch, no network, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from bastion import recipe_yaml, storage
from bastion.measuring.facts import MeasuredCase, Measurement, mixture
from bastion.reporting import plots, tables
from bastion.reporting.gallery import galleries
from bastion.reporting.tables import Comparison, ReportedRun

_WIDE, _NARROW = 760, 350  # a chart is drawn once for a desk and once for a phone


def report(runs: str | Path | Sequence[str | Path], output: str | Path) -> Path:
    """Write the page about one or more run directories to `output`. The same facts give the same bytes."""
    page = render(tables.read_runs([runs] if isinstance(runs, str | Path) else runs))
    storage.write_text(Path(output), page)
    return Path(output)


def render(runs: Sequence[ReportedRun]) -> str:
    comparisons = tables.compare(runs)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            runs=runs,
            comparisons=comparisons,
            summary=tables.summary(comparisons),
            unmeasured=[run for run in runs if not run.measurements],
            untrained=[run for run in runs if not run.records("step") + run.records("epoch")],
            charts=[_charts(comparison, position) for position, comparison in enumerate(comparisons)],
            panels=plots.training_panels(runs),
            galleries=[(run, galleries(run)) for run in runs],
            details=[_details(run) for run in runs],
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


def _details(run: ReportedRun) -> dict[str, Any]:
    """What a reader needs to believe the numbers, or to make them again."""
    resolved = run.files.recipe()
    return {
        "run": run,
        "recipe": None if resolved is None else recipe_yaml.dump(resolved),
        "origins": [("Run", _origin(run.files.provenance()))]
        + [(_measured(facts.about), _measured_by(facts.about)) for facts in run.measurements],
        "described": list(
            dict.fromkeys((case.label, _spec(case)) for facts in run.measurements for case in facts.about.cases)
        ),
        "events": run.records("event"),
    }


def _spec(case: MeasuredCase) -> str:
    """As it could stand in a suite."""
    return yaml.safe_dump(case.spec, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()


def _measured(about: Measurement) -> str:
    return f"Suite {about.suite} on {about.n} images of {about.data['name']} ({about.data['split']})"


def _measured_by(about: Measurement) -> dict[str, str]:
    origin = _origin(about.model_dump())
    return origin | ({"mixed": mixture(about)} if mixture(about) else {})


def _origin(about: Mapping[str, Any]) -> dict[str, str]:
    """Of a provenance or a measurement; older ones may lack some of it."""
    lists = {key: about.get(key, {}) for key in ("machine", "versions")}
    return {
        "date": str(about.get("created", "unknown")),
        "command": str(about.get("command", "unknown")),
        "seed": str(about.get("seed", "unknown")),
        **{key: ", ".join(f"{name} {value}" for name, value in pairs.items()) for key, pairs in lists.items()},
    }
