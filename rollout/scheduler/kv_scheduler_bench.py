"""Bench of the scheduler: decisions a second, and prompt tokens found resident.

The load: sessions of many turns, each turn's prompt longer by a fixed step, on engines whose
budget holds three quarters of all sessions at their longest. The baseline runs in the same
process: a random engine for each call, a per-engine LRU prefix cache and no admission. Both
sides are scored by the same cache model, so the hit rates show the policies and say nothing
about a real engine's speed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rollout.scheduler import KvScheduler

NUM_ENGINES, NUM_TURNS, STEP_TOKENS, NEW_TOKENS = 4, 12, 600, 200


class Outcome(NamedTuple):
    """Figures of one run."""

    decisions_per_s: float
    hit_rate: float  # prompt tokens that were resident / all that could have been


class PrefixCache:
    """LRU of session prefixes in one engine."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._tokens: OrderedDict[str, int] = OrderedDict()

    def hit(self, session: str) -> int:
        return self._tokens.get(session, 0)

    def put(self, session: str, tokens: int) -> None:
        self._tokens[session] = tokens
        self._tokens.move_to_end(session)
        while sum(self._tokens.values()) > self._budget:
            self._tokens.popitem(last=False)


def run_scheduler(num_sessions: int, budget: int) -> Outcome:
    """Our policy; as many calls run at once as it admits."""
    scheduler = KvScheduler(0.9, 30.0, 65536, NEW_TOKENS)
    caches = {f"e{i}": PrefixCache(budget) for i in range(NUM_ENGINES)}
    for name in caches:
        scheduler.add_engine(name, budget)
    hits = possible = decisions = 0
    spent_s, now_s = 0.0, 0.0
    for turn in range(NUM_TURNS):
        left = num_sessions
        began = time.perf_counter()
        for session in range(num_sessions):
            scheduler.submit(
                f"{session}/{turn}",
                str(session),
                (turn + 1) * STEP_TOKENS,
                NEW_TOKENS,
                0,
                now_s,
            )
        while left:
            now_s += 1.0
            admissions = scheduler.poll(now_s)
            spent_s += time.perf_counter() - began
            for admission in admissions:
                session_name = admission.ticket_id.split("/")[0]
                hits += caches[admission.engine].hit(session_name)
                possible += turn * STEP_TOKENS
                caches[admission.engine].put(session_name, (turn + 1) * STEP_TOKENS)
            began = time.perf_counter()
            for admission in admissions:
                scheduler.finish(admission.ticket_id, (turn + 1) * STEP_TOKENS, now_s)
            decisions += len(admissions)
            left -= len(admissions)
        spent_s += time.perf_counter() - began
    return Outcome(decisions / spent_s, hits / possible)


def run_random(num_sessions: int, budget: int) -> Outcome:
    """The baseline: every call goes to a random engine."""
    caches = [PrefixCache(budget) for _ in range(NUM_ENGINES)]
    choose = random.Random(0)
    hits = possible = decisions = 0
    spent_s = 0.0
    for turn in range(NUM_TURNS):
        for session in range(num_sessions):
            began = time.perf_counter()
            cache = caches[choose.randrange(NUM_ENGINES)]
            decisions += 1
            spent_s += time.perf_counter() - began
            hits += cache.hit(str(session))
            possible += turn * STEP_TOKENS
            cache.put(str(session), (turn + 1) * STEP_TOKENS)
    return Outcome(decisions / spent_s, hits / possible)


def measure(run: Callable[[int, int], Outcome], num_sessions: int, repeats: int) -> list[Outcome]:
    """`repeats` runs on engines that hold three quarters of all sessions at their longest."""
    budget = num_sessions * NUM_TURNS * STEP_TOKENS * 3 // (4 * NUM_ENGINES)
    return [run(num_sessions, budget) for _ in range(repeats)]


def rows(num_sessions: int, repeats: int) -> list[dict[str, object]]:
    """One row a metric: ours beside the baseline."""
    ours = measure(run_scheduler, num_sessions, repeats)
    base = measure(run_random, num_sessions, repeats)
    result: list[dict[str, object]] = []
    for index, (metric, unit) in enumerate(
        [("decisions_per_s", "1/s"), ("prefix_hit_rate", "share of prompt tokens")]
    ):
        mine = [outcome[index] for outcome in ours]
        theirs = statistics.median(outcome[index] for outcome in base)
        value = statistics.median(mine)
        result.append(
            {
                "metric": metric,
                "value": value,
                "unit": unit,
                "baseline": theirs,
                "ratio": value / theirs if theirs else None,
                "repeats": repeats,
                "min": min(mine),
                "max": max(mine),
            }
        )
    return result


def main() -> None:
    """Runs the bench and prints a row a metric."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small load, under ten seconds")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    num_sessions, repeats = (64, 3) if args.quick else (512, 5)
    print(
        f"device=cpu engines={NUM_ENGINES} sessions={num_sessions} turns={NUM_TURNS} "
        f"repeats={repeats} baseline=random engine"
    )
    result = rows(num_sessions, repeats)
    for row in result:
        print(
            f"{row['metric']}: {row['value']:.4g} {row['unit']} "
            f"(min {row['min']:.4g}, max {row['max']:.4g}), baseline {row['baseline']:.4g}, "
            f"ratio {row['ratio'] if row['ratio'] is None else format(row['ratio'], '.3g')}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
