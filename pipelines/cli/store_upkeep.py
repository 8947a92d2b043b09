"""`buffer-engine store compact` and `store erase`: fewer bytes for the same rows, and rows without their payload."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from buffer_engine.errors import CorruptSegmentError, UsageError, did_you_mean
from buffer_engine.store.compact import GRACE_SECONDS
from buffer_engine.store.erase import EraseRule, Erasure
from buffer_engine.store.opening import open_store
from pipelines.cli.console import logs, print_text
from pipelines.cli.opening import require_store
from pipelines.retention import AGE, parse_age, replayed_after


def compact(
    folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")],
    everything: Annotated[
        bool, typer.Option("--all", help="also rows that training waits for, and the newest of every table")
    ] = False,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="seconds that files no row lies in any more are kept for readers")
    ] = GRACE_SECONDS,
    max_uses: Annotated[
        int, typer.Option("--max-uses", min=1, help="batches a row may be trained in; until then it is not cold")
    ] = 1,
) -> None:
    """Move cold rows into Parquet files and remove old files; runs may read and write the store meanwhile.

    Cold are rejected, failed, trained and evaluation rollouts, and of the other tables all but the newest rows.
    """
    with open_store(require_store(folder), create=False) as opened, _bar("compacting") as progress:
        done = opened.compact(everything=everything, grace_seconds=grace, max_uses=max_uses, progress=progress)
    if done.rows:
        print_text(
            f"{folder}: {done.rows:,} rows of {done.frames:,} appends are now in {len(done.files)} Parquet files: "
            f"{done.bytes_before:,} bytes became {done.bytes_after:,}"
        )
    else:
        print_text(f"{folder}: nothing to compact{'' if everything else '; --all takes waiting and newest rows too'}")
    if done.removed:
        print_text(f"{done.removed:,} old files removed, {done.freed:,} bytes freed")
    if done.retired:
        print_text(f"{done.retired:,} old files stay for readers; a compaction after {grace:g} s removes them")
    if done.damaged:
        raise CorruptSegmentError(
            f"{len(done.damaged)} damaged frames stay where they are; the first: {done.damaged[0]}"
        )


def erase(
    folder: Annotated[Path, typer.Argument(metavar="STORE", help="folder of the store")],
    reason: Annotated[str, typer.Option("--reason", help="why, for the record")],
    rejected: Annotated[
        str | None, typer.Option("--rejected-older-than", help=f"rejected rows by the age of their verdict: {AGE}")
    ] = None,
    trained: Annotated[
        int | None, typer.Option("--trained-before-step", help="rows last trained before this optimizer step")
    ] = None,
    ids: Annotated[
        Path | None, typer.Option("--ids", help="text file with one experience id a line", dir_okay=False)
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="only rows of this run; alone: all of them")] = None,
    author: Annotated[str | None, typer.Option("--author", help="who erases [default: the user's name]")] = None,
    max_uses: Annotated[
        int, typer.Option("--max-uses", min=1, help="batches a row may be trained in; until then it stays")
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="also rows that training wants")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="seconds that the old files are kept for readers")
    ] = GRACE_SECONDS,
) -> None:
    """Take texts, tokens and log-probs of rollouts out of a store; their identity, scores, verdicts and a record stay.

    Earlier versions show the rows without them too. There is no way back.
    """
    try:
        seconds, versions = (None, None) if rejected is None else parse_age(rejected)
    except ValueError as error:
        raise UsageError(f"--rejected-older-than: {error}") from error
    if [rejected, trained, ids].count(None) < 2:
        raise UsageError("--rejected-older-than, --trained-before-step and --ids exclude each other; erase twice")
    if rejected is None and trained is None and ids is None and run is None:
        raise UsageError("say which rows: --rejected-older-than, --trained-before-step, --ids or --run")
    rule = EraseRule(seconds, versions, trained, None if ids is None else _listed(ids), run)
    with open_store(require_store(folder), create=False) as opened:
        known = opened.info().runs
        if run is not None and run not in known:
            raise UsageError(f"--run {run!r}: {did_you_mean(run, known)}")
        with _bar("erasing") as progress:
            done = opened.erase(
                rule,
                reason=reason,
                author=author or getpass.getuser(),
                dry_run=dry_run,
                force=force,
                max_uses=max_uses,
                replays=replayed_after(opened, folder),
                grace_seconds=grace,
                progress=progress,
            )
    for line in _erasure_lines(done, dry_run=dry_run):
        print_text(f"{folder}: {line}")


def _erasure_lines(done: Erasure, *, dry_run: bool) -> list[str]:
    fates = ", ".join(f"{count:,} {fate}" for fate, count in sorted(done.by_fate.items()))
    lines = [
        f"payload of {done.rows:,} rollouts {'would go' if dry_run else 'erased'}{f' ({fates})' if fates else ''}: "
        f"{done.tokens:,} tokens, {done.bytes:,} bytes"
    ]
    if done.left:
        lines.append(
            f"{done.left:,} rows stay: a batch holds them, training waits for them, or a resumed run would train them "
            "again; --force takes them too"
        )
    if done.retired:
        lines.append(f"{done.retired} old files stay for readers; a compaction after the grace removes them")
    if done.lingering:
        names = ", ".join(done.lingering)
        lines.append(
            f"{len(done.lingering)} files still hold it, because a process appends to them ({names}); "
            "when it has ended, `buffer-engine store compact --all` removes them"
        )
    return lines


def _listed(file: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ids {file}: it cannot be read ({error})") from error
    ids = tuple(dict.fromkeys(line for line in lines if line))
    if not ids:
        raise UsageError(f"--ids {file}: there is no id in it; write one experience id a line")
    return ids


@contextmanager
def _bar(title: str) -> Generator[Callable[[int, int], None]]:
    """A progress bar on stderr, when that is a terminal; the value is called with parts done and parts to do."""
    if not logs.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=logs, transient=True) as live:
        task = live.add_task(title, total=None)
        yield lambda done, total: live.update(task, completed=done, total=total)
