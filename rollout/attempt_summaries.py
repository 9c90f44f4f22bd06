"""Finished attempts as reports want them, from a manager's ledger or from the file of one.

Owner: rollout.manager, which serves them as ListAttempts. The program below reads the ledger
of a run whose manager is gone (or busy): a run that was killed is worth a report too.

    python -P -m rollout.attempt_summaries --ledger RUN/ledger.db --out attempts.bin
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from proto import rollout_pb2 as pb
from rollout.attempt_table import AttemptTable, GroupRules
from rollout.client import write_attempts
from rollout.errors import RolloutError
from rollout.ledger import Ledger


def summaries(attempts: AttemptTable, evaluation: str = "") -> Iterator[pb.AttemptSummary]:
    """Finished attempts of an evaluation (empty: of training) in order of finishing."""
    finished = attempts.select(
        "evaluation=? AND state='finished' ORDER BY finish_order", evaluation
    )
    for attempt in finished:
        state, reason = attempts.group_end(attempt.group_id)
        summary = pb.AttemptSummary(
            ref=attempt.ref(),
            evaluation=attempt.evaluation,
            report=pb.AttemptReport.FromString(attempt.report),
            num_tries=attempt.num_leases,
            consumed_at_version=attempt.consumed_at_version,
            turn_times=pb.TurnTimes.FromString(attempt.turn_times),
            group_state=state,
            group_reason=reason,
            earlier_tries=attempts.earlier_tries(attempt) if attempt.num_leases > 1 else (),
        )
        if attempt.trained:
            summary.trained.ParseFromString(attempt.trained)
        yield summary


def main(argv: list[str] | None = None) -> int:
    """Writes the finished training attempts of a ledger. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="rollout.attempt_summaries", description=__doc__)
    parser.add_argument("--ledger", type=Path, required=True, help="ledger.db of a run")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    try:
        ledger = Ledger.reader(args.ledger)
        rules = GroupRules(0, drop_zero_variance=False, max_zero_variance_refill=0)
        write_attempts(args.out, summaries(AttemptTable(ledger, rules, lambda: "")))
        ledger.close()
    except (OSError, RolloutError, sqlite3.Error) as error:
        print(f"error: cannot list the attempts of {args.ledger}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
