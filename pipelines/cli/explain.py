"""`buffer-engine explain`: what a training batch was made of, and what happened to a row in its whole life."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from buffer_engine.errors import UsageError
from buffer_engine.inspect import Inspection
from pipelines.cli.opening import inspect_store
from pipelines.cli.rendering import cell_text, print_view, records_table
from pipelines.cli.short_ids import short_ids
from pipelines.cli.show import RECORDED_STEPS, resolve_id


def explain(
    store: Annotated[Path, typer.Argument(help="folder of the store")],
    batch: Annotated[int | None, typer.Option("--batch", help="optimizer step whose batch to explain")] = None,
    row: Annotated[str | None, typer.Option("--row", help="experience whose life to tell")] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="run of the batch; needed when the store has several")
    ] = None,
) -> None:
    """Say why a step did what it did: rows, rewards, score versions, advantages, drops, weights and configuration."""
    if (batch is None) == (row is None):
        raise UsageError("explain either --batch STEP or --row ID")
    with inspect_store(store) as inspection:
        if batch is not None:
            print_view(batch_view(inspection, step=batch, run_id=run))
        elif row is not None:
            kind, found = resolve_id(inspection, row)
            if kind != "experience":
                raise UsageError(f"{found} is a group: name one of its rows (show lists them)")
            print_view(life_view(inspection, found))


def batch_view(inspection: Inspection, *, step: int, run_id: str | None) -> RenderableType:
    """Everything behind one optimizer step.

    Raises:
        UsageError: no such step, or several runs have it and none is named.
    """
    batch = _find_batch(inspection, step, run_id)
    key = [batch["batch_id"]]
    after = inspection.rows(
        "SELECT version, path FROM models WHERE run_id = $1 AND step = $2 AND version > $3 ORDER BY version",
        [batch["run_id"], step, batch["model_version"]],
    )
    made = f"{after[0]['version']}" + (f" ({after[0]['path']})" if after[0]["path"] else "") if after else "not written"
    facts = {
        "batch": f"{batch['batch_id']} ({batch['status']})",
        "run, step": f"{batch['run_id']}, {step}",
        "algorithm": batch["algorithm"],
        "rows": f"{batch['rows']} in {batch['groups']} groups, {batch['trained_tokens']} trained tokens",
        "reward used": f"mean {_number(batch['reward_mean'])}",
        "advantage": f"{_number(batch['advantage_min'])} … {_number(batch['advantage_max'])}, "
        f"mean {_number(batch['advantage_mean'])}",
        "weights before": cell_text(batch["model_version"]),
        "weights after": made,
        "staleness": f"at most {cell_text(batch['staleness_max'])}",
        "configuration": batch["config_hash"],
        "code": batch["code_commit"],
        "reader": batch["reader_json"],
        "random state": batch["rng_json"],
        "reserved, prepared, committed": ", ".join(
            cell_text(batch[name]) for name in ("reserved_at", "prepared_at", "committed_at")
        ),
    }
    rows = inspection.rows(
        "SELECT rows.position, rows.experience_id, rows.group_id, rows.reward AS reward_used, "
        "experiences.reward AS reward_now, rows.advantage, rows.weight, rows.kind, staleness.staleness, "
        "rows.score_versions_json AS score_versions FROM batch_rows AS rows "
        "LEFT JOIN experiences USING (experience_id) LEFT JOIN staleness USING (batch_id, position) "
        "WHERE rows.batch_id = $1 ORDER BY rows.position",
        key,
    )
    passed = inspection.rows(
        "SELECT runs.pass_id, runs.operator, rows_in, kept, rejected, held, masked, scored, "
        "nulls, errors, fingerprint FROM operator_runs AS runs "
        "WHERE pass_id IN (SELECT decisions.pass_id FROM decisions JOIN batch_rows USING (experience_id) "
        "  WHERE batch_id = $1 AND verdict = 'keep') ORDER BY runs.pass_id, runs.position",
        key,
    )
    drops = inspection.rows(
        "SELECT pass_id, operator, reason, count(*) AS rows FROM drops "
        "WHERE pass_id IN (SELECT decisions.pass_id FROM decisions JOIN batch_rows USING (experience_id) "
        "  WHERE batch_id = $1 AND verdict = 'keep') GROUP BY ALL ORDER BY pass_id, rows DESC, operator, reason",
        key,
    )
    within, passed, drops = _passes(passed, drops)
    changed = sum(1 for row in rows if _differs(row["reward_used"], row["reward_now"]))
    shown, common = _batch_rows(inspection, rows)
    parts: list[RenderableType] = [_facts(facts), *_table(f"rows{common}", shown)]
    if changed:
        parts.append(
            Text(f"{changed} of {len(rows)} rows scored anew since: the reward of now differs", style="yellow")
        )
    parts += [
        *_table(f"operators that the rows passed{within}", _without_zeros(passed)),
        *_table(f"rejected in the same passes{within}", drops),
    ]
    return Group(*parts)


def _batch_rows(inspection: Inspection, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The batch's rows, one line each, and what all of them share, which needs no column."""
    short = short_ids(inspection, [row[name] for row in rows for name in ("experience_id", "group_id")])
    shared = [
        name for name in ("weight", "kind", "staleness") if len(rows) > 1 and len({row[name] for row in rows}) == 1
    ]
    shown: list[dict[str, Any]] = []
    for row in rows:
        versions = json.loads(row["score_versions"])
        # Nearly every component is used as it was first scored; only what was scored anew is worth a place.
        anew = ", ".join(f"{name} v{version}" for name, version in sorted(versions.items()) if version != 1)
        shown.append(
            {
                "row": row["position"],
                "experience": short[row["experience_id"]],
                "group": short.get(row["group_id"], row["group_id"]),
                "reward_used": _unrounded(row["reward_used"]),
                "reward_now": _unrounded(row["reward_now"]),
                "advantage": _unrounded(row["advantage"]),
                **{name: row[name] for name in ("weight", "kind", "staleness") if name not in shared},
                "scored_anew": anew,
            }
        )
    if not any(row["scored_anew"] for row in shown):
        shown = [{name: value for name, value in row.items() if name != "scored_anew"} for row in shown]
        shared_text = ["score versions 1"]
    else:
        shared_text = ["score versions 1 unless named"]
    shared_text += [f"{name} {cell_text(rows[0][name])}" for name in shared]
    return shown, f" (all: {', '.join(shared_text)})" if rows else ""


def _passes(*tables: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """The tables with their pass as a column, or said once when it is one pass; passes count from 0, batches from 1."""
    names = sorted({row["pass_id"] for rows in tables for row in rows})
    alone = len(names) == 1
    first, second = (
        [
            {**({} if alone else {"pass": f"pass {row['pass_id']}"}),
             **{name: value for name, value in row.items() if name != "pass_id"}}
            for row in rows
        ]
        for rows in tables
    )  # fmt: skip
    return f" (pass {names[0]})" if alone else "", first, second


def _without_zeros(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the counts that are 0 everywhere, and with fingerprints that fit."""
    counts = ("held", "masked", "scored", "nulls", "errors")
    empty = {name for name in counts if not any(row[name] for row in rows)}
    return [
        {name: f"{value[:8]}…" if name == "fingerprint" and len(value) > 9 else value for name, value in row.items()
         if name not in empty}
        for row in rows
    ]  # fmt: skip


def _unrounded(value: float | None) -> float | None:
    """The value, or 0 for what rounding leaves of a sum that is 0."""
    return 0.0 if value is not None and abs(value) < 1e-9 else value


def _number(value: float | None) -> str:
    return cell_text(_unrounded(value))


def life_view(inspection: Inspection, experience_id: str) -> RenderableType:
    """One row from its task to its last batch, in order of time."""
    key = [experience_id]
    [row] = inspection.rows("SELECT * FROM experiences WHERE experience_id = $1", key)
    events: list[tuple[Any, int, str]] = [
        (
            row["created_at"],
            0,
            f"made by {row['made_by']} with weights {cell_text(row['model_version'])} for task {row['task_id']}, "
            f"sample {row['sample_index']} of group {row['group_id']}; {row['token_count']} tokens, "
            f"stopped by {row['stop_reason']}" + (f"; failed: {row['error']}" if row["error"] else ""),
        )
    ]
    trained = inspection.rows(
        "SELECT batches.*, rows.reward, rows.advantage, rows.score_versions_json FROM batch_rows AS rows "
        "JOIN batches USING (batch_id) WHERE experience_id = $1 ORDER BY batches.step",
        key,
    )
    recorded = {seen["step"]: seen for seen in inspection.rows(RECORDED_STEPS, key)}
    steps = [(used["committed_at"], used["step"]) for used in trained if used["committed_at"] is not None]
    for score in inspection.rows("SELECT * FROM scores WHERE experience_id = $1 ORDER BY row_order", key):
        weight = "a metric" if not score["weight"] else f"weight {cell_text(score['weight'])}"
        again = f", version {score['version']}" if score["version"] > 1 else ""
        before = [step for committed_at, step in steps if committed_at <= score["scored_at"]]
        late = f", after step {max(before)}" if before else ""
        said = f": {score['comment']}" if score["comment"] else ""
        events.append(
            (
                score["scored_at"],
                1,
                f"scored {score['name']} = {cell_text(score['value'])} ({weight}) by {score['source']} "
                f"{score['author']}{again}{late}{said}",
            )
        )
    for decision in inspection.rows("SELECT * FROM decisions WHERE experience_id = $1 ORDER BY row_order", key):
        why = f"{decision['reason']}" + (f" ({decision['detail']})" if decision["detail"] else "")
        ref = f", see {decision['ref_id']}" if decision["ref_id"] else ""
        events.append((decision["decided_at"], 2, f"{decision['verdict']} by {decision['operator']}: {why}{ref}"))
    for used in trained:
        versions = json.loads(used["score_versions_json"])
        taken = ", ".join(f"{name} version {version}" for name, version in sorted(versions.items()))
        events.append(
            (
                used["prepared_at"],
                3,
                f"put into {used['batch_id']} (step {used['step']}): reward {cell_text(used['reward'])}"
                + (f" from {taken}" if taken else "")
                + f", advantage {cell_text(used['advantage'])}",
            )
        )
        if used["committed_at"] is not None:
            staleness = None if row["model_version"] is None else used["model_version"] - row["model_version"]
            seen = recorded.get(used["step"])
            apart = (
                ""
                if seen is None or seen["ratio_mean"] is None
                else (
                    f", ratio to the sampler {cell_text(seen['ratio_mean'])} "
                    f"({cell_text(seen['ratio_min'])} … {cell_text(seen['ratio_max'])})"
                )
            )
            events.append(
                (used["committed_at"], 4, f"trained at step {used['step']}, staleness {cell_text(staleness)}{apart}")
            )
    for event in inspection.rows("SELECT * FROM events WHERE experience_id = $1 ORDER BY row_order", key):
        note = f": {event['detail']}" if event["detail"] else ""
        events.append((event["recorded_at"], 5, f"event {event['kind']} × {event['count']}{note}"))
    events.sort(key=lambda event: (event[0], event[1]))
    lines = Text.assemble(("experience ", "bold"), (experience_id, "bold"), f"  run {row['run_id']}\n")
    for moment, _, said in events:
        lines.append(cell_text(moment), style="dim")
        lines.append(f"  {said}\n")
    lines.append("now", style="bold")
    held = f" by {row['reserved_by']}" if row["reserved_by"] else ""
    lines.append(f"  {row['fate']}{held}, reward {cell_text(row['reward'])}")
    return lines


def _find_batch(inspection: Inspection, step: int, run_id: str | None) -> dict[str, Any]:
    found = inspection.rows(
        "SELECT * FROM batches WHERE step = $step AND run_id = coalesce($run, run_id) AND status <> 'released' "
        "ORDER BY run_id, committed_at NULLS LAST",
        {"step": step, "run": run_id},
    )
    runs = sorted({row["run_id"] for row in found})
    if len(runs) > 1:
        raise UsageError(f"step {step} exists in several runs: {', '.join(runs)}; choose one with --run")
    if not found:
        known = inspection.rows(
            "SELECT run_id, min(step) AS first, max(step) AS last FROM batches WHERE step IS NOT NULL "
            "GROUP BY run_id ORDER BY run_id"
        )
        listing = "; ".join(f"{row['run_id']}: steps {row['first']} to {row['last']}" for row in known)
        where = f" of run {run_id!r}" if run_id is not None else ""
        raise UsageError(
            f"no batch{where} has step {step}; " + (f"there are {listing}" if listing else "there is none")
        )
    return found[0]


def _differs(used: float | None, now: float | None) -> bool:
    if used is None:
        return False
    return now is None or abs(used - now) > 1e-9


def _facts(facts: dict[str, str]) -> RenderableType:
    longest = max(len(name) for name in facts)
    text = Text()
    for name, value in facts.items():
        text.append(f"{name:<{longest}}  ", style="bold")
        text.append(f"{value}\n")
    return text


def _table(title: str, rows: list[dict[str, Any]]) -> list[RenderableType]:
    heading = Text(f"{title}" + ("" if rows else ": none"), style="bold")
    if not rows:
        return [heading]
    return [heading, records_table(rows), Text()]
