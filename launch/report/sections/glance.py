"""The run at a glance: a few figures, and what wants attention first."""

from __future__ import annotations

import statistics
from collections import Counter

from launch.report import failures, masking, steps, trajectories
from launch.report.blocks import Tile
from launch.report.data import RunData
from launch.report.svg import number

_QUARTER = 4
_LIMITING = 0.5
_BAD_ESS = 0.5
_BAD_FAILED = 0.05


def tiles(data: RunData) -> list[Tile]:
    """In the order of the sections."""
    made = [_pass(data), _reward(data), _step(data), _rate(data), _trajectory(data), _kv(data),
            _staleness(data), _ess(data), _failed(data), _trained(data)]  # fmt: skip
    return [tile for tile in made if tile is not None]


def alerts(data: RunData) -> list[str]:
    """What is wrong, or not as it should be, most pressing first."""
    found = []
    last = data.status[-1] if data.status else {}
    if last.get("admission_held") and not data.is_finished:
        found.append(f"The run is paused: {last.get('admission_reason') or 'no reason given'}.")
    for backend in last.get("backends", ()):
        if backend.get("state") in ("open", "half_open") and not data.is_finished:
            found.append(
                f"The breaker of {backend['name']} is {backend['state']}: {backend.get('detail', '')}"
            )
    for engine in last.get("engines", ()):
        if engine.get("state") == "failed":
            found.append(f"Engine {engine['name']} failed: {engine.get('detail', '')[:200]}")
    if not data.is_finished and (data.status or data.stages):
        stage = last.get("stage") or (data.stages[-1]["name"] if data.stages else "the start")
        found.append(f"The run has not finished. It was last seen in: {stage}.")
    unlike = [row.what for row in data.counters if not row.agree]
    if unlike:
        found.append(f"The sides' counts differ: {', '.join(unlike)}.")
    causes = data.causes
    if causes["unclassified"]:
        found.append(f"{causes['unclassified']:,} attempts ended unclassified.")
    skipped = sum(bool(row.get("step_skipped")) for row in data.rl)
    if skipped:
        found.append(f"{skipped:,} RL steps trained nothing.")
    tripped = [row["step"] for row in data.rl if row.get("guard_tripped")]
    if tripped:
        found.append(f"A guard tripped at step {', '.join(map(str, tripped[-5:]))}.")
    resumed = steps.resumed_after(data.rl, data.resumed_at_steps)
    if resumed:
        found.append(f"RL was resumed after step {', '.join(map(str, resumed))}.")
    found += [
        f"{override.removeprefix('--')} was set after step {step}."
        for step, override in data.changed_settings
    ]
    return found


def _pass(data: RunData) -> Tile | None:
    rows = [row for row in data.evaluations if row.interval]
    if not rows:
        return None
    sampling = next((r.sampling for r in rows if r.sampling != "greedy"), rows[0].sampling)
    row = [r for r in rows if r.sampling == sampling][-1]
    assert row.interval is not None
    note = f"{row.stage}, {row.sampling}, 95 % [{100 * row.interval.low:.1f}, {100 * row.interval.high:.1f}]"
    tone = ""
    if row.gain:
        note += f"; gain {100 * row.gain.mean:+.1f} [{100 * row.gain.low:+.1f}, {100 * row.gain.high:+.1f}]"
        tone = "good" if row.gain.low > 0 else "bad" if row.gain.high < 0 else ""
    return Tile("pass@1", f"{100 * row.interval.mean:.1f} %", note, "#pass-table", tone)


def _reward(data: RunData) -> Tile | None:
    points = [y for _, y in steps.curve(data.rl, "reward_mean")]
    if not points:
        return None
    quarter = max(1, len(points) // _QUARTER)
    first, last = sum(points[:quarter]) / quarter, sum(points[-quarter:]) / quarter
    return Tile(
        "reward",
        f"{last:.3f}",
        f"last quarter of {len(points)} steps; first: {first:.3f}",
        "#reward",
    )


def _step(data: RunData) -> Tile | None:
    times = steps.step_times(data.rl)
    means = times.means()
    total = sum(means.values())
    if not total:
        return None
    part, seconds = max(means.items(), key=lambda item: item[1])
    share = seconds / total
    limit = {
        "wait": "rollouts limit", steps.BETWEEN: "checkpoints and evaluations limit",
    }.get(part, "the trainer limits")  # fmt: skip
    told = f"{part} {100 * share:.0f} %" + (f": {limit}" if share >= _LIMITING else "")
    return Tile("RL step", f"{number(total)} s", told, "#step-breakdown")


def _rate(data: RunData) -> Tile | None:
    rate, alone = data.throughput.get("rl_trajectories_per_s"), data.throughput.get("ratio")
    if isinstance(rate, (int, float)):
        note = (
            f"{100 * alone:.0f} % of the engines alone" if isinstance(alone, (int, float)) else ""
        )
        return Tile("valid trajectories/h", number(3600 * rate), note, "#measured")
    times = steps.step_times(data.rl)
    total = sum(sum(values) for values in times.parts.values())
    num = sum(y for _, y in steps.curve(data.rl, "num_trajectories"))
    if not total or not num:
        return None
    return Tile(
        "trained trajectories/h", number(3600 * num / total), "over RL steps", "#step-breakdown"
    )


def _trajectory(data: RunData) -> Tile | None:
    parts = trajectories.mean_parts(data.attempts)
    total = sum(parts.values())
    if not total:
        return None
    top = sorted(parts.items(), key=lambda item: -item[1])[:2]
    told = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in top)
    return Tile("a trajectory", f"{number(total)} s", f"mean wall; {told}", "#trajectory-time")


def _kv(data: RunData) -> Tile | None:
    use = [float(e.get("kv_usage", 0.0)) for row in data.status for e in row.get("engines", ())]
    reserved = [
        float(e.get("tokens_reserved", 0)) / float(e["token_budget"])
        for row in data.status
        for e in row.get("engines", ())
        if float(e.get("token_budget", 0))
    ]
    if not use:
        return None
    promised = f"reserved at most {100 * max(reserved):.0f} %" if reserved else ""
    return Tile("KV use, most", f"{100 * max(use):.0f} %", promised, "#kv-over-time")


def _staleness(data: RunData) -> Tile | None:
    counts = data.staleness
    total = sum(counts.values())
    if not total:
        return None
    mean = sum(k * n for k, n in counts.items()) / total
    return Tile("staleness", f"{mean:.2f}", f"mean, updates; largest {max(counts)}", "#staleness")


def _ess(data: RunData) -> Tile | None:
    points = [y for _, y in steps.curve(data.rl, "ess_token_raw_rollout_to_trainer")]
    if not points:
        return None
    least = min(points)
    note = f"least of {len(points)} steps; median {_near_one(statistics.median(points))}"
    tone = "bad" if least < _BAD_ESS else ""
    return Tile("ESS, by token", _near_one(least), note, "#ess", tone)


def _near_one(share: float) -> str:
    """Three digits hide what matters near 1."""
    return f"{share:.4f}" if share > 0.99 else f"{share:.3f}"


def _failed(data: RunData) -> Tile | None:
    ends = failures.try_ends(data.attempts)
    if not ends:
        return None
    failed = Counter(end.cause for end in ends if failures.kind_of(end.cause) != "scored")
    share = failed.total() / len(ends)
    top = failed.most_common(1)
    note = f"of {len(ends):,} tries" + (f"; most: {top[0][0]}" if top else "")
    return Tile(
        "failed tries",
        f"{100 * share:.1f} %",
        note,
        "#causes",
        "bad" if share > _BAD_FAILED else "",
    )


def _trained(data: RunData) -> Tile | None:
    fates = Counter(masking.fate(attempt) for attempt in data.attempts)
    share = masking.trained_share(data.attempts)
    if not share:
        return None
    others = Counter(
        {k: n for k, n in fates.items() if k not in (masking.TRAINED, masking.PENDING)}
    )
    top = others.most_common(1)
    note = "of attempts that were consumed or left out" + (
        f"; most others: {top[0][0]}" if top else ""
    )
    return Tile(
        "trained",
        f"{100 * share:.0f} %",
        note,
        "#fate-outcome-trajectories",
    )
