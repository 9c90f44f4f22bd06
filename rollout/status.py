"""The manager's counters as GetStatus reports them.

Owner: rollout.manager. Reads the ledger and the engines; changes nothing.
"""

from __future__ import annotations

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.manager import RolloutManager

_NUM_RECENT = 64  # scored training attempts in reward_mean_recent (rollout.proto)


def manager_status(manager: RolloutManager) -> pb.GetStatusReply:
    """One moment's view."""
    ledger, attempts = manager.ledger, manager.attempts
    groups = dict(
        tuple(row) for row in ledger.db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state")
    )
    reply = pb.GetStatusReply(
        weight_version=ledger.weight_version,
        lineage=ledger.lineage,
        admission_open=manager.admission_open,
        admission_reason=ledger.get_meta("admission_reason"),
        num_groups_open=groups.get("open", 0),
        num_groups_ready=groups.get("ready", 0),
        num_groups_trained=groups.get("trained", 0),
        num_groups_dropped=groups.get("dropped", 0),
        num_attempts_running=attempts.count("state IN ('leased','running')"),
        num_attempts_queued=attempts.count("state='queued'"),
        num_attempts_finished=attempts.count("state='finished' AND evaluation=''"),
        causes=_causes(manager),
        dropped_reasons=manager.batches.dropped_reasons(),
        reward_mean_recent=_recent_reward(manager),
        num_turns=ledger.number("SELECT COUNT(*) FROM turns"),
        num_sampled_tokens=ledger.number("SELECT SUM(num_sampled) FROM turns"),
        num_turns_queued=manager.admission.num_queued,
        num_turns_admitted=manager.num_turns_admitted,
        update_window_phase=manager.windows.phase,
        republish_requested=manager.republish_requested,
        admission_held=manager.admission_held,
        backends=_backends(manager),
    )
    for engine in manager.pool.engines.values():
        reply.engines.add(
            name=engine.name,
            url=engine.url,
            state=engine.state,
            weight_version=engine.weight_version,
            token_budget=engine.token_budget,
            tokens_reserved=manager.admission.tokens_reserved(engine.name),
            kv_usage=engine.kv_usage,
            num_running=engine.num_running,
            num_requests=engine.num_requests,
            num_generated_tokens=engine.num_generated_tokens,
            num_restarts=engine.num_restarts,
            detail=engine.detail,
        )
    return reply


def _backends(manager: RolloutManager) -> list[pb.BackendStatus]:
    statuses = []
    for name, breaker in manager.ends.backends:
        status = pb.BackendStatus(
            name=name,
            state=breaker.state,
            detail=breaker.detail,
            num_opened=breaker.num_opened,
            num_recent_failures=breaker.num_recent_failures,
        )
        if breaker.outage_s:
            status.opened_at.FromMicroseconds(int((manager.now_s() - breaker.outage_s) * 1e6))
        statuses.append(status)
    return statuses


def _causes(manager: RolloutManager) -> dict[str, int]:
    rows = manager.ledger.db.execute(
        "SELECT cause, COUNT(*) FROM attempts WHERE state='finished' AND evaluation=''"
        " GROUP BY cause"
    )
    prefix = "CAUSE_"
    return {
        tpb.Cause.Name(tpb.Cause.ValueType(cause)).removeprefix(prefix).lower(): count
        for cause, count in rows
    }


def _recent_reward(manager: RolloutManager) -> float:
    row = manager.ledger.one(
        "SELECT AVG(reward) FROM (SELECT reward FROM attempts WHERE state='finished' AND"
        " evaluation='' AND reward IS NOT NULL ORDER BY finish_order DESC LIMIT ?)",
        _NUM_RECENT,
    )
    return float(row[0] or 0.0) if row is not None else 0.0
