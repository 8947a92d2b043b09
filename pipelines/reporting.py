"""The end of a run for a person: the report on stdout, the plot as a file."""

from __future__ import annotations

from rich.console import Console

from pipelines.cli.rendering import print_view
from pipelines.report import text_report, write_reward_plot
from pipelines.runner import RunReport
from pipelines.spec import Spec


def report_run(report: RunReport, spec: Spec, results: Console, logs: Console) -> None:
    """Print what the run did and write the plot that the specification asks for.

    Raises:
        MissingExtraError: a plot is asked for and matplotlib is not installed; the run itself is complete.
    """
    outcome = report.outcome
    facts: list[str] = []
    if outcome.steps:
        facts.append(f"{outcome.steps} steps")
    if outcome.curated_rows:
        facts.append(f"{outcome.curated_rows:,} rows curated")
    if outcome.replayed_steps:
        facts.append(f"{outcome.replayed_steps} steps replayed from their manifests")
    if outcome.skipped_steps:
        facts.append(f"{outcome.skipped_steps} skipped for want of rows")
    if outcome.stopped:
        facts.append(f"stopped: {outcome.stopped}")
    logs.print(
        f"run {report.run_id}: {', '.join(facts or ['nothing was left to do'])}", highlight=False, soft_wrap=True
    )
    print_view(text_report(report.folder, report.run_id), to=results)
    if outcome.final_weights is not None:
        logs.print(f"weights: {outcome.final_weights}", highlight=False)
    if spec.report.plot is not None:
        write_reward_plot(report.folder, report.run_id, spec.report.plot)
        logs.print(f"plot: {spec.report.plot}", highlight=False)
