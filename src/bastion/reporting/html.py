"""The report: a self-contained HTML page about one or more runs. No torch, no network, no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from bastion import recipe_yaml, storage
from bastion.errors import printable
from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredCase, Measurement, mixture, unreadable
from bastion.measuring.table import stopped
from bastion.reporting import figures, histograms, pictures, plots, svg, wording
from bastion.reporting.costs import cost_table
from bastion.reporting.differences import differences, is_significant
from bastion.reporting.gallery import galleries
from bastion.reporting.grids import class_table, confusions, heat_maps
from bastion.reporting.overview import overviews
from bastion.reporting.robustness_curves import distances, resolution_curves, security_curves
from bastion.reporting.summary import page_title, summary
from bastion.reporting.tables import ReportedRun, SharedTable, read_runs, shared_tables
from bastion.reporting.training import training_panels

_WIDTHS = {"wide": 1080, "medium": 700, "narrow": 350}  # of a chart: for desktop, tablet or print, and phone


def report(runs: str | Path | Sequence[str | Path], output: str | Path) -> Path:
    """Write the page about one or more runs to `output`. The same facts give the same bytes.

    A run is its folder, or the model that was measured: `zoo/NAME`, `timm/NAME`, a model folder.
    """
    folders = [runs] if isinstance(runs, str | Path) or not isinstance(runs, Sequence) else runs
    storage.write_text(Path(output), render(read_runs(folders)))
    return Path(output)


def render(runs: Sequence[ReportedRun]) -> str:
    tables = shared_tables(runs)
    overview = overviews(tables)
    sections = {
        "accuracy": [(each, _charts(each), differences(each)) for each in tables if each.has_numbers],
        "attacks": _with_any(tables, _waterfalls),
        "security": _with_any(tables, _security),
        "distances": _with_any(tables, _distances),
        "corruptions": _with_any(tables, heat_maps),
        "resolution": _with_any(tables, _resolution),
        "analysis": _with_any(tables, figures.draw),
        "classes": _classes(tables),
        "pictures": galleries(runs),
        "training": training_panels(runs),
        "cost": _with_any(tables, cost_table),
    }
    return fill(
        "report.html.j2",
        title=page_title(runs, tables),
        runs=runs,
        tables=tables,
        overview=overview,
        summary=summary(tables, overview),
        unmeasured=[run for run in runs if not run.measurements],
        trained=[run for run in runs if run.records("step") + run.records("epoch")],
        details=[_details(run) for run in runs],
        **sections,
    )


def fill(template: str, **content: Any) -> str:
    """Make a page of a template and what it names."""
    return printable(svg.with_unique_ids(_environment().get_template(template).render(content)))


def _environment() -> jinja2.Environment:
    result = jinja2.Environment(
        loader=jinja2.PackageLoader("bastion.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.filters |= {
        "percent": wording.percent,
        "points": wording.points,
        "interval": wording.interval,
        "share_cell": wording.share_cell,
        "quantity": wording.quantity,
        "count": wording.count,
        "amount": wording.amount,
        "radius": wording.radius,
        "norm": wording.norm_sign,
        "significant": is_significant,
        "key": id,
    }
    result.globals |= {"picture": pictures.figure, "run_mark": pictures.run_mark, "stopped": stopped}
    return result


def _with_any(tables: Sequence[SharedTable], make: Callable[[SharedTable], Any]) -> list[tuple[SharedTable, Any]]:
    """Return a section's content for each table that has facts for it."""
    return [(table, shown) for table in tables if (shown := make(table))]


def _charts(table: SharedTable) -> dict[str, Markup]:
    """Return charts by width; none for a suite with less than two accuracies."""
    widths = _WIDTHS if table.charted else {}
    return {name: plots.accuracy_chart(table, width) for name, width in widths.items()}


def _waterfalls(table: SharedTable) -> list[tuple[str, Any, list[Any]]]:
    """Return, per ensemble, the accuracies after each member and a chart for each run."""
    return [
        (label, stages, [(row, plots.waterfall(row, label)) for row in table.rows])
        for label, stages in table.stages().items()
        if len(stages) > 1
    ]


def _security(table: SharedTable) -> list[Markup]:
    return [plots.curve_panel(chart, table.chance) for chart in security_curves(table)]


def _resolution(table: SharedTable) -> list[Markup]:
    return [plots.curve_panel(chart, table.chance) for chart in resolution_curves(table)]


def _distances(table: SharedTable) -> list[tuple[str, Markup, Any]]:
    return [(label, histograms.distance_panel(label, rows), rows) for label, rows in distances(table).items()]


def _classes(tables: Sequence[SharedTable]) -> list[tuple[SharedTable, Any, list[Any]]]:
    """Return class tables, so that each run is shown once per data set, with the most images."""
    found: list[tuple[SharedTable, Any, list[Any]]] = []
    covered: set[tuple[str, int]] = set()
    for each in sorted(tables, key=lambda each: (len(each.rows), each.n), reverse=True):
        pairs = {(storage.fingerprint(each.about.data), run.number) for run in each.runs}
        if not each.outdated and not pairs <= covered and (by_class := class_table(each)):
            found.append((each, by_class, [(row, confusions(row.facts)) for row in each.rows]))
            covered |= pairs
    return found


def _details(run: ReportedRun) -> dict[str, Any]:
    """Return the provenance that is needed to reproduce the numbers."""
    resolved = run.files.recipe()
    return {
        "run": run,
        "recipe": None if resolved is None else recipe_yaml.dump(resolved),
        "origins": [("Run", _origin(run.files.provenance()))]
        + [(_measured(facts.about), _measured_by(facts)) for facts in run.measurements],
        "described": list(
            dict.fromkeys((case.label, _spec(case)) for facts in run.measurements for case in facts.about.cases)
        ),
        "events": run.records("event"),
    }


def _spec(case: MeasuredCase) -> str:
    """Return the settings in the format of a suite."""
    return yaml.safe_dump(case.spec, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()


def _measured(about: Measurement) -> str:
    return f"Suite {about.suite} on {about.n} images of {about.data['name']} ({about.data['split']})"


def _measured_by(facts: Facts) -> dict[str, str]:
    about = facts.about
    digests = {
        "weights": about.weights,
        "images": about.data.get("digest", ""),
        "data": about.data.get("fingerprint", ""),
    }
    origin = _origin(about.model_dump()) | {key: text for key, text in digests.items() if text}
    notes = {"preprocessing": about.preprocessing, "mixed": mixture(about), "left out": unreadable(about)}
    notes["note"] = "; ".join(about.notes)
    return origin | {key: text for key, text in notes.items() if text}


def _origin(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of a run or a measurement; older ones may lack some fields."""
    fields = {key: about.get(key) for key in ("machine", "versions")}
    lists = {key: pairs if isinstance(pairs, Mapping) else {} for key, pairs in fields.items()}
    return {
        "date": str(about.get("created", "unknown")),
        "command": str(about.get("command", "unknown")),
        "seed": str(about.get("seed", "unknown")),
        **{key: ", ".join(f"{name} {value}" for name, value in pairs.items()) for key, pairs in lists.items()},
    }
