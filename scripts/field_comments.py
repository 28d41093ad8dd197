"""For mkdocstrings: the comment beside a field of a class is its description, as everywhere in bastion."""

from __future__ import annotations

from typing import Any

import griffe


class FieldComments(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring or attr.endlineno is None or not (attr.parent and attr.parent.is_class):
            return
        line = attr.lines_collection[attr.filepath][attr.endlineno - 1]
        said = [part.strip() for part in line.split("  # ")[1:] if not part.startswith(("type:", "noqa"))]
        if said:
            attr.docstring = griffe.Docstring(said[0], parent=attr)
