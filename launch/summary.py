"""The table that ends a run on the terminal: pass@1 by stage, the probe, the counters."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from launch.report.data import load_run
from launch.run_directory import RunDirectory


def print_summary(run: RunDirectory, console: Console) -> None:
    """Prints what the run has to show so far."""
    data = load_run(run.root)
    if data.evaluations:
        table = Table(title="pass@1 on held-out tasks, 95 % intervals", title_justify="left")
        for column in (
            "stage",
            "sampling",
            "pass@1",
            "gain on the stage before",
            "tasks",
            "attempts",
            "causes",
        ):
            table.add_column(column)
        for row in data.evaluations:
            table.add_row(
                row.stage,
                row.sampling,
                row.interval.percent() if row.interval else "not scored",
                row.gain.percent() if row.gain else "",
                str(row.interval.num_tasks if row.interval else 0),
                str(row.num_attempts),
                ", ".join(f"{cause} {count}" for cause, count in row.causes.items()),
            )
        console.print(table)
    if data.probe:
        console.print(
            f"probe: {data.probe['num_tokens']} tokens at weight_version {data.probe['weight_version']}, "
            f"mean |rollout - trainer| {data.probe['mean_abs_nats']:.2e} nats, max {data.probe['max_abs_nats']:.2e}",
            highlight=False,
            soft_wrap=True,
        )
    for counter in data.counters:
        sides = ", ".join(f"{side} {count}" for side, count in counter.sides.items())
        verdict = "agree" if counter.agree else "[red]differ[/red]"
        console.print(f"{counter.what}: {sides}: {verdict}", highlight=False, soft_wrap=True)
