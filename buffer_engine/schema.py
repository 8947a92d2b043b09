"""The tables, as Arrow schemas whose fields carry their own documentation.

Heavy payload (`rollouts`, `tasks`) is written once and never rewritten. What is learned later is a narrow append-only
row beside it; current state is a view. Only types that DuckDB, Polars and Parquet take unchanged are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 2
"""Version of the tables and of the catalog; opening a newer store is refused, an older one is migrated."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("media", pa.list_(pa.string())),
    ]
)
TOKEN_VERSION = pa.struct([pa.field("version", pa.int64()), pa.field("length", pa.int32())])
SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("max_tokens", pa.int32()),
        pa.field("seed", pa.int64()),
    ]
)


def _field(name: str, kind: pa.DataType, doc: str, *, null: str = "") -> pa.Field:
    """A field with its documentation; `null` says what a missing value means and makes the field nullable."""
    metadata = {"doc": doc} | ({"null": null} if null else {})
    return pa.field(name, kind, nullable=bool(null), metadata=metadata)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table: its Arrow schema, its key columns, and the columns that a repeated write may differ in.

    Attributes:
        key: columns that identify a row; empty for logs whose rows have no identity (metrics, events).
        volatile: columns left out when a repeated write is compared with the stored row (wall-clock times).
        per_token: list columns that must all have the length of `length_of` in every row where they are not null.
        length_of: the list column that tells how many tokens a row has.
    """

    name: str
    doc: str
    schema: pa.Schema
    key: tuple[str, ...]
    volatile: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    length_of: str = "token_ids"


def _table(
    name: str,
    doc: str,
    fields: Sequence[pa.Field],
    *,
    key: tuple[str, ...] = (),
    volatile: tuple[str, ...] = (),
    per_token: tuple[str, ...] = (),
    length_of: str = "token_ids",
) -> TableSpec:
    return TableSpec(name, doc, pa.schema(fields, metadata={"table": name}), key, volatile, per_token, length_of)


TASKS = _table(
    "tasks",
    "One row per thing to attempt.",
    [
        _field("task_id", pa.string(), "deterministic id: task set name and content hash"),
        _field("taskset", pa.string(), "name of the task set in the specification"),
        _field("partition", pa.string(), "train | eval; the two never mix"),
        _field("messages", pa.list_(MESSAGE), "the prompt's messages"),
        _field("prompt_hash", pa.string(), "hash of the prompt; equal across partitions is refused"),
        _field("info_json", pa.string(), "JSON object: gold answer, metadata; operators read its keys as columns"),
        _field("created_at", TIMESTAMP, "when the row was made"),
    ],
    key=("task_id",),
    volatile=("created_at",),
)

ROLLOUTS = _table(
    "rollouts",
    "One row per trainable token sequence; immutable.",
    [
        _field("experience_id", pa.string(), "deterministic from run, task, group, attempt, sample, turn"),
        _field("parent_id", pa.string(), "row this one was made from", null="sampled or imported, not derived"),
        _field("made_by", pa.string(), "explorer | import | id of the operator that added the row"),
        _field("run_id", pa.string(), "run that wrote the row"),
        _field("task_id", pa.string(), "task it attempts"),
        _field("group_id", pa.string(), "siblings that play one task together; issued by whoever schedules"),
        _field("group_size", pa.int32(), "how many samples the group has when complete"),
        _field("attempt", pa.int32(), "0-based retry number"),
        _field("sample_index", pa.int32(), "0-based position in the group"),
        _field("turn_index", pa.int32(), "0-based segment of the episode (0 unless the token prefix broke)"),
        _field("partition", pa.string(), "train | eval"),
        _field("explore_step", pa.int64(), "loop step whose exploration made the row", null="not made by a loop"),
        _field("model_version", pa.int64(), "oldest weight version that sampled a token of the row", null="no model"),
        _field("token_versions", pa.list_(TOKEN_VERSION), "run lengths of weight versions over the sampled tokens"),
        _field("messages", pa.list_(MESSAGE), "prompt and replies as text"),
        _field("token_ids", pa.list_(pa.int32()), "prompt and sampled ids, exactly as sampled"),
        _field("loss_mask", pa.list_(pa.bool_()), "true where the policy sampled the token and it may train"),
        _field(
            "logprobs",
            pa.list_(pa.float32()),
            "behaviour log-probability in nats; an element is null where nothing was sampled",
            null="the row was not sampled by a model",
        ),
        _field("logprob_kind", pa.string(), "raw | temperature | truncated: the distribution described", null="none"),
        _field("prompt_length", pa.int32(), "tokens before the first sampled one"),
        _field("stop_reason", pa.string(), "eos | length | tool | stop | max_turns | timeout | error | imported"),
        _field("eos_sampled", pa.bool_(), "whether the model itself ended the last reply"),
        _field("truncated", pa.bool_(), "whether a limit cut the sequence"),
        _field("error", pa.string(), "kind: message; such a row never trains and never enters a baseline", null="ok"),
        _field("sampling", SAMPLING, "sampling parameters", null="not sampled"),
        _field("tokenizer_id", pa.string(), "identity of the tokenizer", null="text only"),
        _field("template_hash", pa.string(), "hash of the chat template", null="text only"),
        _field("info_json", pa.string(), "JSON object with what workflow or import added"),
        _field("created_at", TIMESTAMP, "when the row was made"),
    ],
    key=("experience_id",),
    volatile=("created_at",),
    per_token=("loss_mask", "logprobs"),
)

SCORES = _table(
    "scores",
    "One row per named reward component given; a higher version supersedes, history stays.",
    [
        _field("experience_id", pa.string(), "row that is scored"),
        _field("name", pa.string(), "component: the id of the operator, or a free name for late scores"),
        _field("value", pa.float64(), "the score", null="looked at and could not be scored; never means 0"),
        _field("weight", pa.float64(), "share in the reward", null="a metric only, not part of the reward"),
        _field("source", pa.string(), "operator | workflow | judge | human | import | api"),
        _field("author", pa.string(), "operator id, user name, model name"),
        _field("version", pa.int32(), "1-based; the highest is the current one"),
        _field("run_id", pa.string(), "run that gave it"),
        _field("scored_at", TIMESTAMP, "when"),
        _field("comment", pa.string(), "free text", null="none"),
    ],
    key=("experience_id", "name", "version"),
    volatile=("scored_at",),
)

DECISIONS = _table(
    "decisions",
    "One row per verdict of an operator, the reader or a person.",
    [
        _field("experience_id", pa.string(), "row that is judged"),
        _field("verdict", pa.string(), "keep | reject | hold | release | mask"),
        _field("operator", pa.string(), "operator id; `pipeline` for the final keep, `reader` for staleness"),
        _field("position", pa.int32(), "0-based position of the operator", null="not an operator of the list"),
        _field("reason", pa.string(), "short code"),
        _field("detail", pa.string(), "the number and its limit, or the exception", null="none"),
        _field("ref_id", pa.string(), "the row it duplicates, the benchmark item it matches", null="none"),
        _field("pass_id", pa.string(), "curation pass that decided"),
        _field("run_id", pa.string(), "run that decided"),
        _field("decided_at", TIMESTAMP, "when"),
    ],
    key=("experience_id", "operator", "verdict", "pass_id"),
    volatile=("decided_at",),
)

BATCHES = _table(
    "batches",
    "One row per training batch, written before its optimizer step.",
    [
        _field("batch_id", pa.string(), "deterministic from run and step"),
        _field("run_id", pa.string(), "run that trains it"),
        _field("step", pa.int64(), "1-based optimizer step"),
        _field("model_version", pa.int64(), "weights before the step"),
        _field("algorithm", pa.string(), "name of the algorithm"),
        _field("rows", pa.int32(), "rows in the batch"),
        _field("trained_tokens", pa.int64(), "unmasked tokens: the global denominator"),
        _field("config_hash", pa.string(), "hash of the resolved specification"),
        _field("code_commit", pa.string(), "git commit or package version"),
        _field("reader_json", pa.string(), "read policy and its state"),
        _field("rng_json", pa.string(), "seeds and generator state that the step starts from"),
        _field("created_at", TIMESTAMP, "when the manifest was written"),
    ],
    key=("batch_id",),
    volatile=("created_at",),
)

BATCH_ROWS = _table(
    "batch_rows",
    "One row per rollout in a training batch: what the step used.",
    [
        _field("batch_id", pa.string(), "the batch"),
        _field("position", pa.int32(), "0-based position"),
        _field("experience_id", pa.string(), "the rollout"),
        _field("group_id", pa.string(), "its group"),
        _field("reward", pa.float64(), "reward used", null="the algorithm uses none"),
        _field("advantage", pa.float64(), "advantage used", null="per token, or none"),
        _field("weight", pa.float64(), "weight of the row in the loss"),
        _field("kind", pa.string(), "rollout | expert: which loss term the row feeds"),
        _field("score_versions_json", pa.string(), "JSON object: component -> version used"),
        _field("masked", pa.bool_(), "whether a verdict had masked the row: it trains on no token", null="not masked"),
    ],
    key=("batch_id", "position"),
)

MODELS = _table(
    "models",
    "One row per weight version.",
    [
        _field("run_id", pa.string(), "run that made it"),
        _field("version", pa.int64(), "0 is the start; one more per optimizer step"),
        _field("parent", pa.int64(), "version it was trained from", null="the start"),
        _field("step", pa.int64(), "optimizer step that made it"),
        _field("path", pa.string(), "folder with the weights", null="not saved to disk"),
        _field("config_hash", pa.string(), "hash of the resolved specification"),
        _field("code_commit", pa.string(), "git commit or package version"),
        _field("created_at", TIMESTAMP, "when"),
    ],
    key=("run_id", "version"),
    volatile=("created_at", "path"),
)

OPERATOR_RUNS = _table(
    "operator_runs",
    "One row per operator and curation pass: what went in and where it came out.",
    [
        _field("run_id", pa.string(), "run"),
        _field("pass_id", pa.string(), "curation pass"),
        _field("position", pa.int32(), "0-based position; -1 is the intake (failed rollouts)"),
        _field("operator", pa.string(), "operator id"),
        _field("type", pa.string(), "operator type"),
        _field("fingerprint", pa.string(), "hash of class, version and parameters"),
        _field("rows_in", pa.int64(), "rows that reached the operator"),
        _field("kept", pa.int64(), "rows that went on"),
        _field("rejected", pa.int64(), "rows rejected here"),
        _field("held", pa.int64(), "rows held here"),
        _field("masked", pa.int64(), "rows kept with tokens masked"),
        _field("added", pa.int64(), "new rows made here"),
        _field("scored", pa.int64(), "score rows with a value"),
        _field("nulls", pa.int64(), "score rows with null"),
        _field("errors", pa.int64(), "rows on which the operator failed"),
        _field("cpu_seconds", pa.float64(), "processor time"),
        _field("wall_seconds", pa.float64(), "elapsed time"),
        _field("created_at", TIMESTAMP, "when"),
    ],
    key=("run_id", "pass_id", "position"),
    volatile=("created_at", "cpu_seconds", "wall_seconds"),
)

METRICS = _table(
    "metrics",
    "Numbers over steps; the newest row of (run_id, step, name) is the current one.",
    [
        _field("run_id", pa.string(), "run"),
        _field("step", pa.int64(), "optimizer step; 0 is before training"),
        _field("name", pa.string(), "slash-separated name"),
        _field("value", pa.float64(), "the number", null="undefined at this step"),
        _field("recorded_at", TIMESTAMP, "when"),
    ],
)

EVENTS = _table(
    "events",
    "Counted oddities: prefix breaks, retries, skipped steps, resumes.",
    [
        _field("run_id", pa.string(), "run"),
        _field("step", pa.int64(), "loop step", null="outside the loop"),
        _field("kind", pa.string(), "short code"),
        _field("count", pa.int64(), "how many"),
        _field("experience_id", pa.string(), "row concerned", null="not about one row"),
        _field("detail", pa.string(), "free text", null="none"),
        _field("recorded_at", TIMESTAMP, "when"),
    ],
)

TOKEN_STATS = _table(
    "token_stats",
    "One row per rollout and training batch: what the optimizer step saw at every token.",
    [
        _field("batch_id", pa.string(), "the batch"),
        _field("experience_id", pa.string(), "the rollout; the lists have the length of its `token_ids`"),
        _field("run_id", pa.string(), "run that trained it"),
        _field("step", pa.int64(), "1-based optimizer step"),
        _field("trained", pa.list_(pa.bool_()), "true where the token was part of the loss"),
        _field(
            "old_logprobs",
            pa.list_(pa.float32()),
            "log-probability (nats) under the weights before the step; an element is null where it was not computed",
            null="not recorded",
        ),
        _field(
            "ratios",
            pa.list_(pa.float32()),
            "probability under those weights over the behaviour policy's; an element is null where not computed",
            null="not recorded",
        ),
        _field("entropies", pa.list_(pa.float32()), "entropy (nats) of the next-token choice", null="not recorded"),
        _field("advantages", pa.list_(pa.float32()), "advantage; an element is null off the loss", null="none used"),
        _field("recorded_at", TIMESTAMP, "when"),
    ],
    key=("batch_id", "experience_id"),
    volatile=("recorded_at",),
    per_token=("old_logprobs", "ratios", "entropies", "advantages"),
    length_of="trained",
)

MEDIA = _table(
    "media",
    "One row per attachment; the bytes are stored once, under their hash.",
    [
        _field("media_id", pa.string(), "sha256 of the bytes in hexadecimal; what `messages.media` refers to"),
        _field("media_type", pa.string(), "such as image/png"),
        _field("bytes", pa.int64(), "size"),
        _field("name", pa.string(), "file name that it came under first", null="none"),
        _field("created_at", TIMESTAMP, "when it was stored first"),
    ],
    key=("media_id",),
    volatile=("created_at", "name"),
)

ERASURES = _table(
    "erasures",
    "One row per rollout whose payload a retention rule took away; identity, scores and verdicts stay.",
    [
        _field("experience_id", pa.string(), "the rollout"),
        _field("run_id", pa.string(), "run that wrote it"),
        _field("rule", pa.string(), "the rule as it was given"),
        _field("reason", pa.string(), "why, in the words of who erased"),
        _field("author", pa.string(), "who erased"),
        _field("tokens", pa.int64(), "tokens that went"),
        _field("erased_at", TIMESTAMP, "when"),
    ],
    key=("experience_id",),
    volatile=("erased_at",),
)

TABLES: dict[str, TableSpec] = {
    spec.name: spec
    for spec in (
        TASKS, ROLLOUTS, SCORES, DECISIONS, BATCHES, BATCH_ROWS, MODELS, OPERATOR_RUNS, METRICS, EVENTS,
        TOKEN_STATS, MEDIA, ERASURES,
    )
}  # fmt: skip

ROLLOUT_STATE = pa.schema(
    [
        _field("experience_id", pa.string(), "the rollout"),
        _field("sequence", pa.int64(), "global order of arrival"),
        _field("status", pa.string(), "new | kept | rejected | held: the newest final verdict"),
        _field("uses", pa.int32(), "committed batches that trained the row"),
        _field("reserved_by", pa.string(), "batch that holds it now", null="free"),
        _field("trained_step", pa.int64(), "last committed optimizer step", null="never trained"),
    ]
)
"""Mutable bookkeeping of a rollout, kept in the catalog and shown to SQL as `rollout_state`."""

BATCH_STATE = pa.schema(
    [
        _field("batch_id", pa.string(), "the batch"),
        _field("run_id", pa.string(), "run"),
        _field("status", pa.string(), "reserved | prepared | committed | released"),
        _field("step", pa.int64(), "optimizer step", null="not prepared yet"),
        _field("rows", pa.int32(), "rows reserved"),
        _field("reserved_at", TIMESTAMP, "when"),
        _field("committed_at", TIMESTAMP, "when the step was committed", null="not committed"),
    ]
)
"""State of every reservation and batch, kept in the catalog and shown to SQL as `batch_state`."""

QUARANTINE = pa.schema(
    [
        _field("frame_id", pa.int64(), "record batch, in the order of commit"),
        _field("table_name", pa.string(), "table whose rows it holds"),
        _field("segment", pa.string(), "file below `segments`"),
        _field("offset", pa.int64(), "where it begins: bytes, or rows in a Parquet file"),
        _field("rows", pa.int64(), "rows that reads go on without"),
        _field("found_at", TIMESTAMP, "when the damage was met"),
        _field("message", pa.string(), "what is wrong with it"),
    ]
)
"""Damaged record batches, kept in the catalog and shown to SQL as `quarantine`."""
