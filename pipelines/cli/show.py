"""`buffer-engine show`: one experience or one group, for reading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from buffer_engine.errors import UsageError
from buffer_engine.inspect import Inspection
from pipelines.cli.console import logs
from pipelines.cli.opening import Tokenizer, inspect_store
from pipelines.cli.rendering import cell_text, print_view, records_table
from pipelines.cli.short_ids import short_ids

CANDIDATES = 10
MOVED_TOKENS = 5
ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def show(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    name: Annotated[str, typer.Argument(metavar="ID", help="an experience or a group; its first letters are enough")],
    tokens: Annotated[bool, typer.Option("--tokens", help="also the tokens, coloured by log-probability")] = False,
    tokenizer: Tokenizer = None,
) -> None:
    """Print the dialogue, scores, decisions and batches of one experience, or the siblings of one group."""
    with inspect_store(store, tokenizer=tokenizer) as inspection:
        kind, found = resolve_id(inspection, name)
        if kind == "group":
            print_view(group_view(inspection, found))
        else:
            print_view(experience_view(inspection, found, tokens=tokens or tokenizer is not None))
            if tokens and tokenizer is None:
                logs.print("token ids only: --tokenizer FOLDER (or smollm2-135m) shows their text", style="dim")


def resolve_id(inspection: Inspection, prefix: str) -> tuple[str, str]:
    """(experience | group, id) that the prefix stands for.

    Raises:
        UsageError: no id or more than one begins like this.
    """
    found = inspection.rows(
        "WITH ids AS ("
        "  SELECT 'experience' AS kind, experience_id AS id FROM raw.rollouts "
        "  UNION SELECT 'group', group_id FROM raw.rollouts"
        ") SELECT kind, id, id = $prefix AS exact, count(*) OVER () AS total FROM ids "
        "WHERE starts_with(id, $prefix) ORDER BY exact DESC, id LIMIT $most",
        {"prefix": prefix, "most": CANDIDATES},
    )
    if not prefix or not found:
        raise UsageError(
            f"no experience or group begins with {prefix!r}; SELECT experience_id, group_id FROM experiences lists them"
        )
    if found[0]["total"] > 1 and not found[0]["exact"]:
        listing = ", ".join(row["id"] for row in found)
        more = f", … ({found[0]['total']} in all)" if found[0]["total"] > len(found) else ""
        raise UsageError(f"{prefix!r} is the beginning of several ids: {listing}{more}; give more letters")
    return found[0]["kind"], found[0]["id"]


def experience_view(inspection: Inspection, experience_id: str, *, tokens: bool = False) -> RenderableType:
    """Everything about one rollout, as panels."""
    key = [experience_id]
    [row] = inspection.rows("SELECT * FROM experiences WHERE experience_id = $1", key)
    parts: list[RenderableType] = [_head(row)]
    for message in inspection.rows(
        "SELECT role, content, tool_calls FROM transcripts WHERE experience_id = $1 ORDER BY position", key
    ):
        body = message["content"] or ""
        if message["tool_calls"]:
            body += f"\n{message['tool_calls']}"
        style = ROLE_STYLES.get(message["role"], "white")
        parts.append(Panel(Text(body.strip("\n")), title=message["role"], title_align="left", border_style=style))
    if row["error"] is not None:
        parts.append(Panel(Text(row["error"]), title="error", title_align="left", border_style="red"))
    if tokens:
        parts.append(_tokens(inspection, experience_id))
    parts += _tables(
        inspection,
        key,
        {
            "scores": "SELECT name, version, value, weight, is_current, source, author, scored_at, comment FROM scores "
            "WHERE experience_id = $1 ORDER BY name, version",
            "decisions": "SELECT verdict, operator, position, reason, detail, ref_id, 'pass ' || pass_id AS pass, "
            "decided_at FROM decisions WHERE experience_id = $1 ORDER BY row_order",
            "batches": "SELECT batches.step, batches.batch_id, status, rows.reward, rows.advantage, rows.weight, "
            "rows.kind, batches.model_version FROM batch_rows AS rows JOIN batches USING (batch_id) "
            "WHERE experience_id = $1 ORDER BY batches.step",
            **({"recorded steps": RECORDED_STEPS} if _recorded(inspection) else {}),
        },
    )
    return Group(*parts)


RECORDED_STEPS = (
    "SELECT step, len(list_filter(trained, lambda one: one)) AS trained_tokens, list_avg(ratios) AS ratio_mean, "
    "list_min(ratios) AS ratio_min, list_max(ratios) AS ratio_max, list_avg(entropies) AS entropy_mean "
    "FROM token_stats WHERE experience_id = $1 ORDER BY step"
)
"""What steps saw at the tokens of one row; see `trainer.token_stats`."""


def _recorded(inspection: Inspection) -> bool:
    """Whether any step of the store was recorded token by token."""
    return inspection.query("SELECT 1 FROM token_stats LIMIT 1").num_rows > 0


def group_view(inspection: Inspection, group_id: str) -> RenderableType:
    """The siblings of a group: their numbers in a table, their replies in panels."""
    key = [group_id]
    [group] = inspection.rows("SELECT * FROM groups WHERE group_id = $1", key)
    rows = inspection.rows(
        "SELECT * FROM experiences WHERE group_id = $1 ORDER BY attempt, sample_index, turn_index", key
    )
    title = Text.assemble(
        ("group ", "bold"),
        (group_id, "bold"),
        f"  run {group['run_id']} · {group['partition']} · task {group['task_id']} · weights "
        f"{cell_text(group['model_version'])} · {group['samples']} of {group['group_size']} samples · ",
        group["status"],
    )
    numbers = Text(
        f"reward {cell_text(group['reward_mean'])} ± {cell_text(group['reward_std'])}, solved share "
        f"{cell_text(group['solved_share'])}; kept {group['kept']}, rejected {group['rejected']}, "
        f"held {group['held']}, new {group['new']}, failed {group['errors']}, trained {group['trained']}"
    )
    parts: list[RenderableType] = [title, numbers, Text()]
    parts.append(Panel(Text(rows[0]["prompt"]), title="prompt", title_align="left", border_style="cyan"))
    short = short_ids(inspection, [row["experience_id"] for row in rows])
    siblings = [
        {
            "sample": row["sample_index"],
            "experience": short[row["experience_id"]],
            "fate": row["fate"],
            "reward": row["reward"],
            "tokens": row["token_count"],
            "stop": row["stop_reason"],
            "rejected by": "" if row["rejected_by"] is None else f"{row['rejected_by']}: {row['reason']}",
        }
        for row in rows
    ]
    if not any(sibling["rejected by"] for sibling in siblings):
        for sibling in siblings:
            del sibling["rejected by"]
    parts.append(records_table(siblings))
    for row in rows:
        heading = Text(
            f"{row['sample_index']} · {row['experience_id']} · {row['fate']} · reward {cell_text(row['reward'])}"
        )
        body = Text(row["response"]) if row["error"] is None else Text(row["error"], style="red")
        style = "red" if row["error"] is not None else "green" if row["solved"] else "yellow"
        parts.append(Panel(body, title=heading, title_align="left", border_style=style))
    return Group(*parts)


def _head(row: dict[str, Any]) -> Text:
    lines = Text.assemble(
        ("experience ", "bold"),
        (row["experience_id"], "bold"),
        f"  run {row['run_id']} · {row['partition']} · task {row['task_id']} ({cell_text(row['taskset'])})\n",
        f"group {row['group_id']}, sample {row['sample_index']} of {row['group_size']}",
        f" · weights {cell_text(row['model_version'])} · step {cell_text(row['explore_step'])} · by {row['made_by']}",
    )
    if row["parent_id"] is not None:
        lines.append(f" from {row['parent_id']}")
    lines.append(
        f"\n{row['token_count']} sampled of {row['total_tokens']} tokens · stopped by {row['stop_reason']}"
        + (" · cut off" if row["truncated"] else "")
    )
    style = {"trained": "green", "waiting": "green", "reserved": "green", "kept": "green", "new": "cyan"}
    lines.append("\n")
    lines.append(row["fate"], style=style.get(row["fate"], "red"))
    if row["rejected_by"] is not None:
        lines.append(f" by {row['rejected_by']}: {row['reason']}" + (f" ({row['detail']})" if row["detail"] else ""))
    if row["trained_step"] is not None:
        lines.append(f" at step {row['trained_step']}, {row['uses']}×, staleness {cell_text(row['staleness'])}")
    lines.append(" · reward ")
    lines.append(cell_text(row["reward"]), style="bold")
    return lines


def _tables(inspection: Inspection, key: list[str], questions: dict[str, str]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for title, question in questions.items():
        found = inspection.rows(question, key)
        parts.append(Text(f"\n{title}" + ("" if found else ": none"), style="bold"))
        if found:
            columns = [column for column in found[0] if any(row[column] is not None for row in found)]
            parts.append(records_table([{column: row[column] for column in columns} for row in found]))
    return parts


def _tokens(inspection: Inspection, experience_id: str) -> RenderableType:
    """Sampled tokens from green (expected) to red (surprising); prompt tokens dim."""
    line = Text()
    found = inspection.rows(
        "SELECT position, token_id, token_text, sampled, logprob, stats_step, old_logprob, ratio, entropy FROM tokens "
        "WHERE experience_id = $1 ORDER BY position",
        [experience_id],
    )
    for token in found:
        text = token["token_text"] if token["token_text"] is not None else f"{token['token_id']} "
        line.append(text, style=_token_style(token["sampled"], token["logprob"]))
    legend = Text("sampled with p ≥ 0.5 ", style="green")
    legend.append("≥ 0.1 ", style="yellow")
    legend.append("below", style="bold red")
    legend.append("; prompt and injected tokens dim", style="dim")
    parts: list[RenderableType] = [line, legend]
    moved = sorted(
        (token for token in found if token["ratio"] is not None), key=lambda one: -abs(math.log(one["ratio"]))
    )
    if moved:
        parts.append(Text(f"\nfurthest from the sampler at step {moved[0]['stats_step']}", style="bold"))
        shown = ("position", "token_id", "token_text", "logprob", "old_logprob", "ratio", "entropy")
        parts.append(
            records_table(
                [{name: token[name] for name in shown if token[name] is not None} for token in moved[:MOVED_TOKENS]]
            )
        )
    return Panel(Group(*parts), title="tokens", title_align="left")


def _token_style(sampled: bool, logprob: float | None) -> str:
    if not sampled:
        return "dim"
    if logprob is None:
        return ""
    # ln 0.5 and ln 0.1
    return "green" if logprob >= -0.693147 else "yellow" if logprob >= -2.302585 else "bold red"
