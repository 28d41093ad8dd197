"""Results in a file, one line each, so that a command that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bastion import storage

SOURCE = Path(__file__).parents[2] / "src"


def source_version() -> str:
    """Results of other code do not count."""
    return storage.sha256(*(path.read_bytes() for path in sorted(SOURCE.rglob("*.py"))))[:12]


class Record:
    """Results by name, of the present code."""

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, source_version()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.results: dict[str, Any] = {
            line["name"]: line["result"] for line in lines if line["version"] == self.version
        }

    def add(self, name: str, result: Any) -> None:
        self.results[name] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"version": self.version, "name": name, "result": result}) + "\n")
