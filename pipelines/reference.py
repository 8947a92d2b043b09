"""Reference pages from the code itself: tables from their Arrow fields, components and sections from their models.

The same texts are printed by `buffer-engine schema` and `operators`, and written to `docs/` by
`python -m pipelines.reference docs`; a test compares the pages with the code, so they cannot drift apart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from buffer_engine.registry import Registry
from buffer_engine.schema import BATCH_STATE, ROLLOUT_STATE, SCHEMA_VERSION, TABLES
from pipelines.describe import FieldDoc, document, field_choices


@dataclass(frozen=True, slots=True)
class DocumentedTable:
    """A table as it is documented: what it is, its columns, and the columns that identify a row."""

    doc: str
    schema: pa.Schema
    key: tuple[str, ...]


DOCUMENTED_TABLES: Mapping[str, DocumentedTable] = {
    **{name: DocumentedTable(spec.doc, spec.schema, spec.key) for name, spec in TABLES.items()},
    "rollout_state": DocumentedTable(
        "Where each rollout stands now; kept by the store, not appended.", ROLLOUT_STATE, ("experience_id",)
    ),
    "batch_state": DocumentedTable("Where each batch stands now; kept by the store.", BATCH_STATE, ("batch_id",)),
}


def tables_text(names: Sequence[str]) -> str:
    """Tables for a terminal."""
    parts: list[str] = []
    for name in names:
        table = DOCUMENTED_TABLES[name]
        key = f"  key: {', '.join(table.key)}" if table.key else "  no key: a log"
        rows = [
            (field.name, str(field.type) + ("?" if field.nullable else ""), _meaning(field)) for field in table.schema
        ]
        parts.append(f"{name}: {table.doc}\n{key}\n{_columns(rows)}")
    return "\n\n".join(parts) + "\n"


def tables_markdown(names: Sequence[str]) -> str:
    """Tables as the page `docs/reference/tables.md`."""
    parts = [
        "# Tables",
        "Written by `python -m pipelines.reference docs` from `buffer_engine/schema.py`; do not edit by hand.",
        f"Schema version {SCHEMA_VERSION}. A type with `?` may be null; what null means is said where it may be.",
    ]
    for name in names:
        table = DOCUMENTED_TABLES[name]
        key = f"Key: {', '.join(f'`{column}`' for column in table.key)}." if table.key else "No key: a log."
        lines = ["| column | type | meaning |", "|---|---|---|"]
        lines += [
            f"| `{field.name}` | `{field.type}{'?' if field.nullable else ''}` | {_cell(_meaning(field))} |"
            for field in table.schema
        ]
        parts += [f"## {name}", f"{table.doc} {key}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _meaning(field: Any) -> str:
    notes = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    return notes.get("doc", "") + (f"; null: {notes['null']}" if "null" in notes else "")


def listing(registry: Registry) -> str:
    """Every component of a kind with the first line of its documentation."""
    rows = [(name, summary_of(registry.load(name))) for name in registry.names()]
    return _columns(rows)


def component_text(registry: Registry, name: str) -> str:
    """One component: documentation, fields, and for operators the contract."""
    found = registry.load(name)
    parts = [f"{name} ({registry.kind})", inspect.getdoc(found) or "", "fields:", fields_text(found.Config)]
    contract = _contract_lines(found, name)
    if contract:
        parts += ["contract:", "\n".join(f"  {line}" for line in contract)]
    requires = [f"{module} (extra {extra})" for module, extra in getattr(found, "requires", ())]
    if requires:
        parts.append(f"requires: {', '.join(requires)}")
    return "\n".join(part for part in parts if part)


def fields_text(model: type[BaseModel]) -> str:
    """A model's fields for a terminal; fields of sections inside it are indented below."""
    rows = [
        (f"{'  ' * depth}{doc.name}", doc.kind, "required" if doc.default is None else doc.default, doc.description)
        for depth, doc in nested_fields(model)
    ]
    return _columns(rows)


def nested_fields(model: type[BaseModel], depth: int = 0) -> list[tuple[int, FieldDoc]]:
    """Fields of a model, each followed by those of a plain section below it."""
    found: list[tuple[int, FieldDoc]] = []
    for doc in document(model):
        found.append((depth, doc))
        for choice in field_choices(model.model_fields[doc.name]):
            if choice.registry is None and isinstance(choice.kind, type) and issubclass(choice.kind, BaseModel):
                found.extend(nested_fields(choice.kind, depth + 1))
    return found


def fields_markdown(model: type[BaseModel]) -> str:
    """A model's fields as a Markdown table; a field of a section inside it is written `section.field`."""
    lines = ["| field | kind | default | meaning |", "|---|---|---|---|"]
    names: list[str] = []
    for depth, doc in nested_fields(model):
        names[depth:] = [doc.name]
        default = "required" if doc.default is None else f"`{doc.default}`"
        lines.append(f"| `{'.'.join(names)}` | {_cell(doc.kind)} | {_cell(default)} | {_cell(doc.description)} |")
    return "\n".join(lines)


def summary_of(found: object) -> str:
    """First line of a component's documentation."""
    return (inspect.getdoc(found) or "").split("\n", 1)[0]


def _contract_lines(found: Any, name: str) -> list[str]:
    """What an operator promises with its defaults, and `‹field›` for what has none; empty for what has no contract."""
    if not hasattr(found, "contract"):
        return []
    needed = [field for field, info in found.Config.model_fields.items() if info.is_required() and field != "type"]
    try:
        contract = found(found.Config.model_validate({"type": name, **{key: f"‹{key}›" for key in needed}})).contract()
    except ValidationError:
        return ["depends on its fields; `buffer-engine check` shows it for a specification"]
    lines = [
        f"reads: {', '.join(sorted(contract.reads)) or 'nothing'}",
        f"writes: {', '.join(contract.writes) or 'no columns'}",
        f"scores: {', '.join(contract.scores) or 'nothing'}",
        f"scope: {contract.scope}, cost: {contract.cost}",
    ]
    doors = [door for door in ("drops", "holds", "masks", "adds") if getattr(contract, door)]
    return [*lines, f"rows: {', '.join(doors) or 'all kept'}"]


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns, the last one running on."""
    widths = [min(max(len(row[index]) for row in rows), 44) for index in range(len(rows[0]) - 1)] if rows else []
    return "\n".join(
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def components_markdown() -> str:
    """Every component of every kind with its fields: the page `docs/reference/components.md`."""
    from explorers.registry import MODELS, TASKSETS, WORKFLOWS
    from operators.registry import OPERATORS
    from trainers.registry import ADVANTAGES, ALGORITHMS, TRAINERS

    parts = [
        "# Components",
        "Written by `python -m pipelines.reference docs` from the code; do not edit by hand. "
        "`buffer-engine operators NAME` prints the same for one of them.",
    ]
    for title, registry in (
        ("Operators", OPERATORS),
        ("Task sets", TASKSETS),
        ("Workflows", WORKFLOWS),
        ("Models", MODELS),
        ("Trainers", TRAINERS),
        ("Algorithms", ALGORITHMS),
        ("Advantages", ADVANTAGES),
    ):
        parts.append(f"## {title}")
        for name in registry.names():
            found = registry.load(name)
            parts += [f"### {name}", inspect.getdoc(found) or "", fields_markdown(found.Config)]
            contract = _contract_lines(found, name)
            if contract:
                parts.append("\n".join(f"- {line}" for line in contract))
    return "\n\n".join(part for part in parts if part) + "\n"


def sections_markdown() -> str:
    """Every section of a specification: the page `docs/reference/specification.md`."""
    from pipelines.spec import Spec

    parts = [
        "# Specification: sections and fields",
        "Written by `python -m pipelines.reference docs` from `pipelines/spec.py`; do not edit by hand. "
        "How to use them is told in [configuration](../configuration.md).",
    ]
    top = [
        f"| `{doc.name}` | {_cell(doc.kind)} | {'required' if doc.default is None else f'`{_cell(doc.default)}`'} "
        f"| {_cell(doc.description)} |"
        for doc in document(Spec)
    ]
    parts.append("\n".join(["| section | kind | default | meaning |", "|---|---|---|---|", *top]))
    for name, info in Spec.model_fields.items():
        for model in section_models(info):
            parts += [f"## {name}", inspect.getdoc(model) or "", fields_markdown(model)]
    return "\n\n".join(parts) + "\n"


def section_models(info: Any) -> list[type[BaseModel]]:
    """Models that a section of the specification is written with, not counting components."""
    from typing import get_args

    from pipelines.describe import choices

    found: list[type[BaseModel]] = []
    for choice in field_choices(info):
        arguments = [inner for part in get_args(choice.kind) for inner in choices(part)]
        for inner in (choice, *arguments):
            if inner.registry is None and isinstance(inner.kind, type) and issubclass(inner.kind, BaseModel):
                found.append(inner.kind)
    return found


PAGES = {
    "reference/tables.md": lambda: tables_markdown(list(DOCUMENTED_TABLES)),
    "reference/components.md": components_markdown,
    "reference/specification.md": sections_markdown,
}
"""Generated pages: place below `docs/` → text."""


def write_pages(docs: Path) -> list[Path]:
    """Write every generated page below `docs`; the files written."""
    written: list[Path] = []
    for name, page in PAGES.items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        sys.stdout.write(f"{path}\n")
