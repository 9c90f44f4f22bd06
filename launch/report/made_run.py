"""Makes a run directory as a long, eventful run leaves it, for tests of the report's pages.

Invented figures in the real files' form: attempts and status go through the code that collects
them. The run has two engines, an outage of the sandboxes, a night between a crash and its
resume, a long tail, stale tokens, periodic evaluations and a guard that tripped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from launch.attempt_rows import write_attempt_rows
from launch.monitor import status_row
from proto import rollout_pb2, trajectory_pb2

_BEGAN_AT = 1_760_000_000.0
_SAMPLE_S = 2.0
_NIGHT_S = 30_000.0
_GROUP = 8
_STAGES = (("pretrain", 200), ("evaluate base", 40), ("sft", 20), ("evaluate sft", 40), ("rl", 700))
_CAUSES = (
    (trajectory_pb2.CAUSE_SUBMITTED, 0.86), (trajectory_pb2.CAUSE_TURN_CAP, 0.06),
    (trajectory_pb2.CAUSE_TOKEN_CAP, 0.03), (trajectory_pb2.CAUSE_SANDBOX_FAILED, 0.025),
    (trajectory_pb2.CAUSE_ENGINE_FAILED, 0.015), (trajectory_pb2.CAUSE_UNCLASSIFIED, 0.01),
)  # fmt: skip
_FATES = ("trained", "trained", "trained", "dropped", "ready")


def make_run(root: Path, *, num_attempts: int = 5000, num_steps: int = 60, seed: int = 0) -> Path:
    """Writes the run and returns its root."""
    random = np.random.default_rng(seed)
    metrics = root / "metrics"
    metrics.mkdir(parents=True)
    (root / "config.toml").write_text(
        f"[run]\nseed = {seed}\n\n[rl]\nmax_staleness = 2\nnum_steps = {num_steps}\n"
    )
    stages = [{"name": name, "duration_s": float(seconds)} for name, seconds in _STAGES]
    _json(root / "state.json", {"stages": stages, "finished": True})
    _json(metrics / "evaluations.json", _evaluations(random, num_steps))
    _json(metrics / "best.json", {"step": 40, "weight_version": 42, "pass_at_1": 0.61})
    _json(metrics / "probe.json", {
        "weight_version": 2, "num_tokens": 12142, "mean_abs_nats": 3.9e-8, "max_abs_nats": 6.6e-6,
    })  # fmt: skip
    _json(
        metrics / "counters.json",
        {"execs": {"broker": 4, "harness": 4}, "model calls": {"a": 1, "b": 2}},
    )
    _json(metrics / "overlap.json", {
        "max_staleness": 2, "num_steps": num_steps, "wall_s": 690.0, "trainer_wait_s": 310.5,
        "engine_tokens_per_s_in_trainer_steps": 610.0, "engine_tokens_per_s_outside": 905.0,
        "ratio_in_trainer_steps_to_outside": 0.674,
    })  # fmt: skip
    _json(metrics / "throughput.json", {
        "rl_trajectories_per_s": 6.4, "generate_only_trajectories_per_s": 10.2, "ratio": 0.627,
    })  # fmt: skip
    for stage, steps in (("pretrain", 650), ("sft", 25)):
        rows = [
            {"step": s, "loss": 6 * 0.99**s + 0.1 * random.random()} for s in range(1, steps + 1)
        ]
        _lines(metrics / f"{stage}.jsonl", rows)
    _lines(metrics / "rl.jsonl", _rl(random, num_steps))
    _lines(metrics / "status.jsonl", _status(random))
    write_attempt_rows(metrics, (_attempt(random, i, num_attempts) for i in range(num_attempts)))
    return root


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _lines(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _evaluations(random: np.random.Generator, num_steps: int) -> dict[str, Any]:
    def one(stage: str, temperature: float, p: float, **more: Any) -> dict[str, Any]:
        n = 4 if temperature else 1
        tasks = [
            {
                "task_id": f"task-{t:04d}",
                "rewards": [float(random.random() < p) for _ in range(n)],
                "causes": ["submitted"] * n,
                "attempt_ids": [],
            }
            for t in range(40 if "step" in more else 200)
        ]
        return {"stage": stage, "temperature": temperature, "agent": "mini",
                "weight_version": more.get("step", 1) + 2, "tasks": tasks, **more}  # fmt: skip

    made = {
        f"{stage}-{t:g}": one(stage, t, p + 0.15 * (t == 0))
        for stage, p in (("base", 0.12), ("sft", 0.38), ("rl", 0.6))
        for t in (1.0, 0.0)
    }
    for step in range(0, num_steps + 1, 8):
        p = 0.38 + 0.25 * min(step / 40, 1) - 0.1 * (step > 48)
        made[f"rl-step-{step}"] = one(f"rl-step-{step}", 1.0, p, pool="dev", step=step)
    return made


def _moment(seconds: float) -> float:
    """Unix time of a moment of the run; the night falls into RL."""
    return _BEGAN_AT + seconds + (_NIGHT_S if seconds >= 650 else 0.0)


def _rl(random: np.random.Generator, num_steps: int) -> list[dict[str, Any]]:
    rows = []
    each_s = 690.0 / num_steps
    for step in range(1, num_steps + 1):
        parts = dict(zip(("wait", "fetch", "logprob", "update", "publish", "other"),
                         each_s * np.array([0.45, 0.04, 0.06, 0.3, 0.09, 0.01]), strict=True))  # fmt: skip
        parts["wait"] *= 0.8 + 0.2 * random.random()
        ended = _moment(305.0 + step * each_s)
        spans, at = [], ended - sum(parts.values())
        for part, seconds in parts.items():
            spans.append([part, at, at + seconds])
            at += seconds
        resumed = ended >= _moment(650)
        rows.append(
            {
                "stage": "rl", "step": step, "weight_version": step + 2, "finished_at": ended,
                "staleness_histogram": {"0": 30, "1": 22, "2": 8 + step % 4, "3": step % 3},
                "lineage": 2.0 if resumed else 1.0, "spans": spans,
                "loss": -0.3 + 0.05 * random.standard_normal(),
                "reward_mean": 0.35 + 0.3 * step / num_steps + 0.05 * random.standard_normal(),
                "reward_std": 0.47, "grad_norm": float(0.1 * np.exp(random.standard_normal())),
                "entropy_mean_nats": 0.3 * 0.99**step,
                "trained_tokens_per_trajectory_mean": 1500 + 6 * step,
                "num_trajectories": 60.0, "num_groups_dropped": float(step % 2),
                "num_tokens_masked_stale": float(step % 5) * 300,
                "staleness_mean": 0.6 + 0.2 * random.random(), "staleness_max": 2.0 + (step % 3 > 0),
                "gap_total_mean_nats": float(5e-4 * np.exp(random.standard_normal())),
                "gap_engine_mean_nats": 4e-8, "gap_total_max_nats": 0.8, "gap_engine_max_nats": 6e-6,
                "ess_token_raw_rollout_to_trainer": 0.998, "ess_sequence_raw_rollout_to_trainer": 0.93,
                "ess_token_cap2_rollout_to_trainer": 0.999, "tis_capped_fraction": 0.002,
                "clip_fraction_active": 0.001, "publish_to_first_token_s": 0.9 + 0.1 * random.random(), "time_step_s": sum(parts.values()),
                **{f"time_{part}_s": seconds for part, seconds in parts.items()},
                **({"guard_left_max_grad_norm": 1.0, "guard_tripped": 1.0} if step == 33 else {}),
            }
        )  # fmt: skip
    return rows


def _status(random: np.random.Generator) -> list[dict[str, Any]]:
    rows, begin, tokens = [], 0.0, [0, 0]
    for stage, seconds in _STAGES:
        for at in np.arange(begin, begin + seconds, _SAMPLE_S):
            samples = stage.startswith("evaluate") or stage == "rl"
            held = bool(500 <= at < 540)
            status = rollout_pb2.GetStatusReply(
                weight_version=3, num_attempts_running=16 if samples and not held else 0,
                num_attempts_queued=int(random.integers(0, 9)) if samples else 0,
                num_groups_open=6, num_groups_ready=int(random.integers(0, 5)),
                admission_held=held, admission_reason="entropy left its band" if held else "",
            )  # fmt: skip
            status.backends.add(name="sandbox", state="open" if 420 <= at < 450 else "closed")
            for index in range(2):
                tokens[index] += int(random.integers(800, 1500)) if samples else 0
                if index and abs(at - 600) < 1:
                    tokens[index] = 0  # the engine was restarted
                status.engines.add(
                    name=f"engine{index}", state="serving", token_budget=65536,
                    tokens_reserved=int(random.integers(30_000, 62_000)) if samples else 0,
                    kv_usage=float(random.random() * 0.5) if samples else 0.0,
                    num_generated_tokens=tokens[index],
                )  # fmt: skip
            rows.append(status_row(status, _moment(float(at)), stage))
        begin += seconds
    return rows


def _attempt(random: np.random.Generator, i: int, of: int) -> rollout_pb2.AttemptSummary:
    group = i // _GROUP
    task = group % 180
    fate = _FATES[group % len(_FATES)]
    causes, shares = zip(*_CAUSES, strict=True)
    cause = int(random.choice(causes, p=shares))
    scored = cause < trajectory_pb2.CAUSE_SANDBOX_FAILED
    slow = 8.0 if task % 60 == 7 else 1.0
    tokens = int(random.lognormal(7.5, 0.6))
    summary = rollout_pb2.AttemptSummary(
        num_tries=1, group_state=fate, group_reason="zero_variance" if fate == "dropped" else ""
    )
    ref, report, turns = summary.ref, summary.report, summary.turn_times
    ref.attempt_id, ref.group_id = f"g{group:06d}-{i % _GROUP:02d}", f"g{group:06d}"
    ref.task_id, ref.cause = f"django__django-{task:05d}", trajectory_pb2.Cause.ValueType(cause)
    ref.num_tokens, ref.num_trained_tokens, ref.num_turns = tokens, tokens // 3, 5
    if scored:
        solved = cause == trajectory_pb2.CAUSE_SUBMITTED and random.random() < 0.5
        ref.reward = float(solved)
    report.evidence = "" if scored else f"exception=HealthcheckError lease l-{i:08x} answered 503"
    model = slow * float(random.lognormal(1.0, 0.5))
    parts = {"environment": 0.5, "grading_environment": 0.2, "model": model, "tool": 0.8 * slow,
             "verifier": 0.6, "overhead": 0.05}  # fmt: skip
    for name, seconds in parts.items():
        getattr(report, f"{name}_time").FromMilliseconds(int(1000 * seconds))
    for name, share in (
        ("queued", 0.1),
        ("generating", 0.85),
        ("engine_queued", 0.1),
        ("window_paused", 0.05),
    ):
        getattr(turns, name).FromMilliseconds(int(1000 * share * model))
    ended = _moment(310.0 + 680.0 * i / of)
    tried_again = random.random() < 0.06
    wall = sum(parts.values()) - parts["grading_environment"] + 0.1 + 3.0 * tried_again
    ref.finished_at.FromMilliseconds(int(1000 * ended))
    ref.started_at.FromMilliseconds(int(1000 * (ended - wall)))
    if tried_again:
        summary.num_tries = 2
        again = summary.earlier_tries.add(
            cause=trajectory_pb2.CAUSE_SANDBOX_FAILED, evidence=f"sandbox {i} was gone: exit 137"
        )
        again.ended_at.FromMilliseconds(int(1000 * (ended - wall / 2)))
    if fate == "trained" and scored:
        summary.consumed_at_version = 3
        stale = tokens // 9 if random.random() < min(0.8, tokens / 8000) else 0
        summary.trained.num_tokens, summary.trained.num_tokens_masked_stale = (
            tokens // 3 - stale,
            stale,
        )
        if tokens > 7000:
            summary.trained.num_tokens, summary.trained.untrained_reason = 0, "stale"
    return summary
