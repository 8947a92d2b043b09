"""The page about SQL, written from the views themselves, so that it cannot disagree with them.

`python -m buffer_engine.inspect.reference docs/sql.md` renews the generated part of the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from buffer_engine.inspect.connect import connect
from buffer_engine.inspect.library import SqlText, named_queries, views
from buffer_engine.schema import BATCH_STATE, ROLLOUT_STATE, TABLES

BEGIN = "<!-- generated: python -m buffer_engine.inspect.reference docs/sql.md -->"
END = "<!-- end of the generated part -->"


def reference_markdown() -> str:
    """Views with their columns, and named queries with their help."""
    lines: list[str] = ["## Views", ""]
    with connect({}) as inspection:
        for view in views().values():
            lines += [f"### {view.name}", "", view.help, "", "| column | type | meaning |", "|---|---|---|"]
            for name, kind in inspection.columns(view.name):
                lines.append(f"| `{name}` | {_short(kind)} | {_cell(_meaning(view, name))} |")
            lines.append("")
    lines += ["## Named queries", "", "`buffer-engine sql STORE --name QUERY`", "", "| query | answers |", "|---|---|"]
    lines += [f"| `{query.name}` | {_cell(query.help)} |" for query in named_queries().values()]
    return "\n".join(lines)


def renewed(page: str) -> str:
    """The page with its generated part written anew.

    Raises:
        ValueError: the page lacks one of the two marks.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page needs the marks {BEGIN!r} and {END!r}")
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n\n{reference_markdown()}\n\n{END}{after}"


def _stored_docs() -> dict[str, str]:
    docs: dict[str, str] = {"row_order": "order of commit"}
    schemas = [ROLLOUT_STATE, BATCH_STATE, *(spec.schema for spec in TABLES.values())]
    for schema in schemas:
        for field in schema:
            metadata: dict[bytes, bytes] = field.metadata or {}
            null = metadata.get(b"null", b"").decode()
            docs.setdefault(field.name, metadata.get(b"doc", b"").decode() + (f"; null: {null}" if null else ""))
    return docs


def _meaning(view: SqlText, column: str) -> str:
    """The view's own note; else what the stored table of that name says; else any table's."""
    if column in view.columns:
        return view.columns[column]
    spec = TABLES.get(view.name)
    if spec is not None and column in spec.schema.names:
        metadata: dict[bytes, bytes] = spec.schema.field(column).metadata or {}
        null = metadata.get(b"null", b"").decode()
        return metadata.get(b"doc", b"").decode() + (f"; null: {null}" if null else "")
    return _stored_docs().get(column, "")


def _short(kind: str) -> str:
    return "list of structs" if kind.startswith("STRUCT") and kind.endswith("[]") else kind.split("(")[0].lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    """Renew the page named by the only argument; without one, print the generated part."""
    if not arguments:
        print(reference_markdown())
        return
    page = Path(arguments[0])
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
