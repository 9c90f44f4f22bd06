"""Is it off-policy? Staleness, and how far the trainer's log-probs are from the engine's."""

from __future__ import annotations

from launch.report.blocks import Figure, Section
from launch.report.charts import Axes, Key, stacked_columns
from launch.report.data import RunData
from launch.report.sections.learning import step_figure


def staleness_figure(data: RunData) -> Figure:
    """Histogram of consumed trajectories by staleness."""
    counts = data.staleness
    xs = list(range(max(counts) + 1)) if counts else []
    limit = data.settings.get("rl", {}).get("max_staleness")
    bound = f" The recipe allows {limit:g}." if isinstance(limit, (int, float)) else ""
    return Figure(
        "staleness",
        "Staleness",
        "Updates between the oldest token of a trajectory and the step that consumed it. "
        "0 is on-policy. Tokens above the limit are masked, not trained." + bound,
        stacked_columns(
            "staleness",
            xs,
            [(Key("trajectories", "blue"), [float(counts[x]) for x in xs])],
            Axes("updates", "trajectories", integer_x=True, tip_x="staleness"),
        ),
    )


def section(data: RunData) -> Section:
    """The section."""
    cap = next(
        (key for row in data.rl[-1:] for key in row if key.startswith("ess_token_cap")),
        "ess_token_cap",
    )
    blocks = [
        staleness_figure(data),
        step_figure(
            data, "staleness-by-step", "Staleness by step",
            "Of the trajectories that the step consumed. A steady rise means that rollouts are "
            "slower than the gate was set for.",
            [("staleness_mean", "mean"), ("staleness_max", "largest")], "updates",
        ),
        step_figure(
            data, "gap", "Log-prob gap",
            "|trainer - engine| a token. “Engine only” compares tokens of the trainer's own weights: "
            "numerics alone, and near 0 if the two agree. “Total” adds staleness.",
            [("gap_total_mean_nats", "total"), ("gap_engine_mean_nats", "engine only")],
            "nats, mean", may_log=True,
        ),
        step_figure(
            data, "gap-max", "Largest log-prob gap",
            "The worst token of a step. One bad token does little; a trend is a mismatch.",
            [("gap_total_max_nats", "total"), ("gap_engine_max_nats", "engine only")],
            "nats, largest", may_log=True,
        ),
        step_figure(
            data, "ess", "Effective sample size",
            "Of the importance weights, as a share of the samples: 1 is on-policy. “Sequence” "
            "multiplies a trajectory's tokens and falls first.",
            [
                ("ess_token_raw_rollout_to_trainer", "token"),
                ("ess_sequence_raw_rollout_to_trainer", "sequence"),
                (cap, "token, weights capped"),
            ],
            "share", y_range=(0.0, 1.0),
        ),
        step_figure(
            data, "clipping", "Clipped and capped",
            "Share of tokens whose weight was capped, or whose gradient the trust region removed.",
            [
                ("tis_capped_fraction", "weight capped"),
                ("clip_fraction_active", "gradient clipped"),
            ],
            "share of tokens",
        ),
        step_figure(
            data, "masked-stale", "Masked as stale",
            "Tokens older than the limit, left out of the loss.",
            [("num_tokens_masked_stale", "")], "tokens",
        ),
    ]  # fmt: skip
    return Section("off-policy", "Is it off-policy?", "", blocks, "No RL step has ended yet.")
