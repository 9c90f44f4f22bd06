"""The table that ends a run on the terminal: pass@1 by stage, the probe, the counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.report.data import load_run
from launch.run_directory import RunDirectory


def _rates(run: RunDirectory) -> list[str]:
    """How fast RL was beside the engines alone, and how far sampling and training overlapped."""
    lines = []
    rates, overlap = _json(run.metrics / "throughput.json"), _json(run.metrics / "overlap.json")
    if rates.get("ratio"):
        lines.append(
            f"throughput: RL {rates['rl_trajectories_per_s']:.1f} finished valid trajectories/s, the "
            f"same engines alone {rates['generate_only_trajectories_per_s']:.1f}: "
            f"ratio {rates['ratio']:.2f}"
        )
    ratio = overlap.get("ratio_in_trainer_steps_to_outside")
    if ratio is not None:
        lines.append(
            f"overlap: engines {overlap['engine_tokens_per_s_in_trainer_steps']:.0f} tokens/s during "
            f"trainer steps, {overlap['engine_tokens_per_s_outside']:.0f} outside: ratio {ratio:.2f}; "
            f"RL wall {overlap['wall_s']:.1f} s, of which the trainer waited "
            f"{overlap['trainer_wait_s']:.1f} s"
        )
    return lines


def _json(path: Path) -> dict[str, Any]:
    """Empty for a file that is not there: the run did not come so far."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


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
    for line in _rates(run):
        console.print(line, highlight=False, soft_wrap=True)
    for counter in data.counters:
        sides = ", ".join(f"{side} {count}" for side, count in counter.sides.items())
        verdict = counter.verdict if counter.agree else f"[red]{counter.verdict}[/red]"
        console.print(f"{counter.what}: {sides}: {verdict}", highlight=False, soft_wrap=True)
