"""Is it what it says? The probe, every side's own counts, the stages, the settings."""

from __future__ import annotations

from launch.report.blocks import Section, Table
from launch.report.data import RunData
from launch.report.svg import number


def section(data: RunData) -> Section:
    """The section."""
    probe = [
        (
            f"{data.probe['num_tokens']:,}",
            str(data.probe["weight_version"]),
            f"{data.probe['mean_abs_nats']:.2e}",
            f"{data.probe['max_abs_nats']:.2e}",
        )
    ] if {"num_tokens", "weight_version", "mean_abs_nats", "max_abs_nats"} <= set(data.probe) else []  # fmt: skip
    blocks = [
        Table(
            "probe",
            "Probe: engine against trainer",
            "Log-probs of tokens sampled after a flush, recomputed by the trainer at the same version: "
            "mean and largest |rollout - trainer| in nats.",
            ("tokens", "weight_version", "mean", "largest"),
            probe,
            numeric=(0, 1, 2, 3),
            wide=False,
        ),
        Table(
            "counters",
            "Each side's own count",
            "Of the same calls, tokens and commands since the processes were last started.",
            ("what", "counts", ""),
            [
                (
                    row.what,
                    ", ".join(f"{side} {count:,}" for side, count in row.sides.items()),
                    row.verdict,
                )
                for row in data.counters
            ],
            wide=False,
        ),
        Table(
            "stages",
            "Stages of the job",
            "Steps of a resumed run appear once for each time that they were worked on.",
            ("stage", "s"),
            [(str(stage["name"]), number(stage["duration_s"])) for stage in data.stages],
            numeric=(1,),
            wide=False,
        ),
    ]
    return Section("checks", "Is it what it says?", "", blocks, "Nothing has been compared yet.")
