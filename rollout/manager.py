"""RolloutManager: who runs which attempt, what was sampled, and what the trainer gets.

Owner of the ledger, the token store, the scheduler's tickets, the engines, their update
windows, the backends' breakers and the run's pause. One asyncio loop runs everything; every ledger transition is one synchronous
transaction, so that nothing interleaves with it.

    driver --AddTasks, StartEvaluation--> [tasks] [evaluations]
                                             |
    worker --LeaseAttempts--> staleness gate -> task sampler -> group of G attempts
    gateway --AdmitTurn--> TurnAdmission (KvScheduler) -> engine
            --AppendTurn--> token store (disk), then turn row, then ticket back
    worker --FinishAttempt--> breakers -> retry | group judged: ready or dropped(reason)
    trainer --NextBatch--> oldest ready groups --AckBatch--> trained
            --OpenUpdateWindow .. CloseUpdateWindow--> UpdateWindows -> engines

What blocks: LeaseAttempts waits for work (gate, engines, a backend's outage, a pause),
AdmitTurn for KV room, NextBatch for ready groups, GetEvaluation for its end. Each wakes from
`Waiters`, which every transition notifies. `tick` requeues expired leases, gives up lost
tickets and lets the probes of an outage through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_ends import AttemptEnds, session_id
from rollout.attempt_table import Attempt, AttemptTable, GroupRules
from rollout.batch_table import BatchTable, Rewound
from rollout.config import RolloutConfig
from rollout.engines.engine_pool import Engine, EnginePool
from rollout.engines.errors import EngineError
from rollout.engines.update_window import (
    ClosedWindow,
    OpenedWindow,
    TransferResult,
    UpdateWindows,
)
from rollout.errors import (
    BadRequestError,
    ConflictError,
    DeadlineError,
    FencedError,
    RolloutError,
    UnavailableError,
)
from rollout.evaluations import Evaluations
from rollout.experts import read_layout
from rollout.first_tokens import FirstTokens
from rollout.group_filter import CauseKind, cause_kind
from rollout.kv_keys import KvKeys
from rollout.leases import Leases
from rollout.ledger import Ledger
from rollout.sessions import Sessions
from rollout.token_store import TokenStore
from rollout.turn_admission import Grant, TurnAdmission
from rollout.waiters import Waiters

_LOG = logging.getLogger(__name__)
_STARTED_WITH = 1  # weight_version of weights that engines load from disk at their start


class RolloutManager:
    """All of the above; server.py puts it on the wire."""

    def __init__(
        self,
        config: RolloutConfig,
        ledger: Ledger,
        tokens: TokenStore,
        pool: EnginePool,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        make_key: Callable[[], str],
    ) -> None:
        """`clock` gives Unix seconds, `monotonic` seconds for waits, `make_key` session keys."""
        self.config = config
        self.ledger = ledger
        self.pool = pool
        self.waiters = Waiters()
        self._tokens = tokens
        self._clock = clock
        rules = GroupRules(
            config.min_valid_members, config.drop_zero_variance, config.max_zero_variance_refill
        )
        self.attempts = AttemptTable(ledger, rules, make_key)
        self.batches = BatchTable(ledger, self.attempts)
        self.evaluations = Evaluations(ledger, self.attempts)
        layout = read_layout(config.engines.model_path) if config.engines.routed_experts else None
        self.first_tokens = FirstTokens()
        self.sessions = Sessions(config, self.attempts, self.evaluations, tokens, layout)
        self.admission = TurnAdmission(
            config.scheduler, KvKeys(config.engines.kv_policy), monotonic
        )
        self.ends = AttemptEnds(
            config, self.attempts, self.sessions, tokens, self.admission, clock, monotonic
        )
        self.leases = Leases(config, ledger, self.attempts, self.ends, pool, clock)
        self.windows = UpdateWindows(pool, ledger, config.engines, monotonic)
        self._ticker: asyncio.Task[None] | None = None
        self._adoptions: set[asyncio.Task[None]] = set()
        self._num_admitted_before = int(ledger.get_meta("num_turns_admitted", "0"))
        pool.on_change = self._engine_changed

    def recover(self) -> None:
        """Requeues what a manager before us left leased; call it before the first request."""
        requeued = self.attempts.requeue_all_active(self._clock())
        if requeued:
            _LOG.warning("requeued %d attempts that were leased before the restart", requeued)
        if self.config.engines.load_format == "auto" and self.ledger.max_weight_version == 0:
            self.ledger.take_weight_version(_STARTED_WITH)
            self.ledger.publish(_STARTED_WITH)

    async def start(self) -> None:
        """Begins to start the engines, and the sweeps."""
        await self.pool.start()
        self._ticker = asyncio.create_task(self._run_ticker())

    async def close(self) -> None:
        """Ends waiting, the engines and the ledger."""
        self.waiters.close()
        tasks = [t for t in (self._ticker, *self._adoptions) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()
        self._save_counters()
        self.ledger.close()

    def now_s(self) -> float:
        """Unix seconds by the manager's clock."""
        return self._clock()

    # ---- drivers

    def add_tasks(self, pool: int, tasks: Sequence[pb.Task]) -> int:
        """Adds tasks in one transaction; returns how many are new."""
        if pool not in (pb.POOL_TRAIN, pb.POOL_DEV, pb.POOL_TEST):
            raise BadRequestError(f"AddTasks: pool {pool} is none of TRAIN, DEV, TEST")
        if any(not t.task_id or not t.path for t in tasks):
            raise BadRequestError("AddTasks: every task needs a task_id and a path")
        with self.ledger.transaction():
            added = sum(self.ledger.add_task(t.task_id, t.path, pool) for t in tasks)
        self.waiters.notify()
        return added

    def set_admission(self, is_open: bool, reason: str, *, hold: bool = False) -> None:
        """Opens or closes admission of new training groups; survives a restart.

        With `hold`, a pause, queued attempts of training groups wait too.
        """
        with self.ledger.transaction():
            self.ledger.set_meta("admission_open", int(is_open))
            self.ledger.set_meta("admission_reason", "" if is_open else reason)
            self.ledger.set_meta("admission_held", int(hold and not is_open))
        if is_open:
            self.ends.rates.reset()
        self.waiters.notify()

    @property
    def admission_held(self) -> bool:
        """Whether the run is paused: no attempt of a training group starts."""
        return self.ledger.get_meta("admission_held", "0") == "1"

    @property
    def admission_open(self) -> bool:
        """Whether new training groups may start; closed until a driver opens it."""
        return self.ledger.get_meta("admission_open", "0") == "1"

    async def start_evaluation(self, request: pb.StartEvaluationRequest) -> pb.GetEvaluationReply:
        """Starts an evaluation, or one that was cancelled again, at the version served now.

        Raises:
            UnavailableError: the agent samples, and no version is served or a window is open.
        """
        if not self.evaluations.is_known(request) or self.evaluations.is_cancelled(request.name):
            version = self.ledger.weight_version
            if request.agent == "mini" and (version == 0 or self.windows.phase):
                raise UnavailableError(
                    f"evaluation {request.name}: no weight_version stands (last published: "
                    f"{version}, window: {self.windows.phase or 'closed'}); publish, then start it"
                )
            if request.flush_before:
                await self._flush_for(request.name)
            if not self.evaluations.is_known(request):  # another call came first meanwhile
                self.evaluations.start(request, version)
            elif self.evaluations.is_cancelled(request.name):
                self.evaluations.restart(request.name, version)
            self.waiters.notify()
        return self.evaluations.progress(request.name)

    async def _flush_for(self, evaluation: str) -> None:
        try:
            await self.pool.flush_cache()
        except EngineError as error:
            raise UnavailableError(
                f"evaluation {evaluation}: a cache was not flushed ({error}); start it again"
            ) from error

    async def wait_evaluation(self, name: str, timeout_s: float) -> pb.GetEvaluationReply:
        """Its results, or how far it is when the time ran out or its weights are needed again."""

        def look() -> pb.GetEvaluationReply:
            reply = self.evaluations.progress(name)
            reply.republish_requested = not reply.finished and self._has_lost_weights(name)
            return reply

        def ended() -> pb.GetEvaluationReply | None:
            reply = look()
            return reply if reply.finished or reply.republish_requested else None

        return await self.waiters.until(ended, timeout_s) or look()

    # ---- gateways

    async def admit_turn(self, request: pb.AdmitTurnRequest, timeout_s: float) -> Grant:
        """Checks ownership and caps, then waits for an engine."""
        attempt = self.attempts.held(request.attempt_id, request.epoch)
        self.sessions.check_caps(attempt, request)
        if attempt.evaluation:
            priority = self.config.group_size
        else:
            priority = self.attempts.count(
                "group_id=? AND state='finished'", attempt.group_id
            )  # siblings of nearly complete groups first
        return await self.admission.admit(
            request.ticket_id,
            session_id(attempt),
            request.prompt_tokens,
            request.max_new_tokens,
            priority,
            timeout_s,
        )

    def append_turn(
        self, ticket_id: str, epoch: int, turn: tpb.TurnRecord, experts: bytes = b""
    ) -> None:
        """Makes a turn durable: the record on disk, then its row; then the ticket goes back.

        Args: experts are those at turn.num_routed_tokens tokens.

        Raises:
            FencedError: the epoch is old, or an evaluation's turn came from another version.
            ConflictError: another turn stands at this index.
        """
        attempt = self.attempts.held(turn.attempt_id, epoch)
        if violation := self.sessions.pin_violation(attempt, turn):
            self._end_try(
                attempt, CauseKind.INFRASTRUCTURE, tpb.CAUSE_INTERRUPTED, evidence=violation
            )
            raise FencedError(
                f"attempt {attempt.attempt_id} of evaluation {attempt.evaluation} was {violation}: "
                "this try is void"
            )
        total_length = self.sessions.append(attempt, turn, experts)
        if total_length is None:
            self.admission.release(ticket_id)
        else:
            self.first_tokens.observe(turn)
            self.admission.finish(ticket_id, total_length)

    async def release_ticket(self, ticket_id: str, engine_failed: bool, detail: str) -> None:
        """Gives a ticket back; a failed engine is checked, and restarted if need be."""
        engine = self.admission.release(ticket_id)
        if engine_failed and engine:
            await self.pool.report_failure(engine, detail or "a gateway's call failed")

    # ---- harness workers

    async def lease_attempts(
        self, worker: str, max_attempts: int, timeout_s: float, incarnation: str = ""
    ) -> list[Attempt]:
        """Leases up to `max_attempts`; waits for the first, and returns none when none came.

        A new `incarnation` under the name takes back what the one before held.

        Raises:
            FencedError: a newer process has the name.
        """
        if not worker or max_attempts < 1:
            raise BadRequestError("LeaseAttempts: want a worker name and max_attempts > 0")
        if self.leases.claim_name(worker, incarnation):
            self.waiters.notify()
        return await self.waiters.until(lambda: self._lease(worker, max_attempts), timeout_s) or []

    def _lease(self, worker: str, max_attempts: int) -> list[Attempt] | None:
        return self.leases.grant(
            worker,
            max_attempts,
            new_groups=self.admission_open,
            training=not self.admission_held,
        )

    def renew(self, worker: str, keys: Sequence[pb.AttemptKey]) -> tuple[list[bool], float]:
        """Extends leases; which are held, and until when (Unix seconds)."""
        return self.leases.renew(worker, keys)

    def finish_attempt(self, request: pb.FinishAttemptRequest) -> bool:
        """Ends a try; True when the attempt was requeued for another."""
        kind = _checked_kind(request)
        attempt = self.attempts.get(request.attempt_id)
        reward = request.reward if request.HasField("reward") else None
        if attempt.state == "finished" and attempt.epoch == request.epoch:
            if (attempt.cause, attempt.reward) != (request.cause, reward):
                raise ConflictError(
                    f"attempt {attempt.attempt_id} ended already, with cause "
                    f"{tpb.Cause.Name(tpb.Cause.ValueType(attempt.cause))} and reward "
                    f"{attempt.reward}"
                )
            return False
        if self.attempts.requeued_with(request.attempt_id, request.epoch) == request.cause:
            return True
        attempt = self.attempts.held(request.attempt_id, request.epoch)
        report = request.report
        away = report.backend_away or (
            request.cause == tpb.CAUSE_ENGINE_FAILED and not self.leases.has_engine
        )
        return self._end_try(
            attempt,
            kind,
            request.cause,
            reward,
            report.SerializeToString(),
            report.evidence,
            away=away,
        )

    # ---- the trainer

    async def next_batch(
        self, step: int, num_groups: int, weight_version: int, timeout_s: float
    ) -> str | None:
        """The batch of `step`; None when an engine waits for a full update instead.

        Raises:
            DeadlineError: not enough groups became ready in time.
        """
        if step < 1 or num_groups < 1:
            raise BadRequestError(f"NextBatch: got step {step}, num_groups {num_groups}; want > 0")

        def look() -> str | None:
            batch = self.batches.find(step)
            if batch is None:
                batch = self.batches.claim(step, num_groups, weight_version)
            if batch is None and self.republish_requested:
                return ""
            return batch

        batch = await self.waiters.until(look, timeout_s)
        if batch is None:
            raise DeadlineError(
                f"step {step}: {self.batches.num_ready()} of {num_groups} groups are ready after "
                f"{timeout_s:.1f} s; ask again"
            )
        return batch or None

    @property
    def republish_requested(self) -> bool:
        """True while an engine with old weights waits for a version that others had."""
        return (
            self.ledger.weight_version > 0
            and not self.windows.phase
            and any(
                e.state == "stale" and not self._is_adoptable(e) for e in self.pool.engines.values()
            )
        )

    def acknowledge(self, request: pb.AckBatchRequest) -> None:
        """Marks a batch as trained; the staleness gate opens."""
        self.batches.acknowledge(
            request.batch_id,
            request.step,
            request.weight_version,
            request.dropped_groups,
            request.trajectories,
        )
        self.waiters.notify()

    def rewind(self, step: int, token: str, batch_ids: Sequence[str] = ()) -> Rewound:
        """Goes back to the checkpoint of `step`, trained on `batch_ids`, and opens a lineage."""
        if not token:
            raise BadRequestError("Rewind: want a lineage_token, random per start of the trainer")
        rewound = self.batches.rewind(step, token, batch_ids)
        self.waiters.notify()
        return rewound

    def report_checkpoint(self, oldest_kept_step: int) -> None:
        """Deletes tokens that no kept checkpoint needs, unless the settings keep them."""
        if self.config.keep_consumed_tokens:
            return
        for attempt_id in self.batches.take_deletable(oldest_kept_step):
            self._tokens.delete(attempt_id)

    async def open_window(self, request: pb.OpenUpdateWindowRequest) -> OpenedWindow:
        """Pauses the scheduler and the engines for a new version.

        Raises:
            ConflictError: the version is not above every one before.
        """
        # Taken before the window is: should this process die inside it, the version is spent.
        self.ledger.take_weight_version(request.weight_version)
        self.ends.windows.follow(True, self._clock())
        try:
            return await self.windows.open(
                request.weight_version,
                request.plan_digest,
                request.num_tensors,
                request.total_bytes,
            )
        finally:
            self._follow_window()

    async def close_window(self, request: pb.CloseUpdateWindowRequest) -> ClosedWindow:
        """Ends the window; if an engine serves the version, it is the published one."""
        results = [
            TransferResult(r.engine, r.complete, r.touched, r.error) for r in request.results
        ]
        try:
            closed = await self.windows.close(request.epoch, request.weight_version, results)
            if closed.engines_serving and request.weight_version > self.ledger.weight_version:
                self.ledger.publish(request.weight_version)
                self._cancel_evaluations(request.weight_version)
            return closed
        finally:
            self._follow_window()

    # ---- inside

    async def _run_ticker(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_s)
            try:
                self.tick()
            except Exception:  # noqa: BLE001
                # A full disk, say, must not end the sweeps for good; the next one may succeed.
                _LOG.exception("sweep failed")

    def tick(self) -> None:
        """Ends tries whose lease ran out, gives up lost tickets, follows window and backends."""
        if self.ends.expire():
            self._look_at_failures()
        self._follow_backends()
        self.admission.reclaim_lost()
        self._follow_window()
        self.admission.pump()
        self._save_counters()

    @property
    def num_turns_admitted(self) -> int:
        """Granted tickets, over restarts too."""
        return self._num_admitted_before + self.admission.num_admitted

    def _save_counters(self) -> None:
        total = str(self.num_turns_admitted)
        if self.ledger.get_meta("num_turns_admitted", "0") != total:
            with self.ledger.transaction():
                self.ledger.set_meta("num_turns_admitted", total)

    def _end_try(
        self,
        attempt: Attempt,
        kind: CauseKind,
        cause: int,
        reward: float | None = None,
        report: bytes = b"",
        evidence: str = "",
        *,
        away: bool = False,
    ) -> bool:
        """Ends a try, then looks at the failure rates; True when the attempt was requeued."""
        requeued = self.ends.end(attempt, kind, cause, reward, report, evidence, away=away)
        self._look_at_failures()
        return requeued

    def _look_at_failures(self) -> None:
        if reason := self.ends.rates.verdict():
            self._pause(reason)
        self._follow_backends()
        self.waiters.notify()

    def _follow_backends(self) -> None:
        """Tells of breakers that changed, and lets those wait no longer whom they let through."""
        changes = self.ends.backends.take_changes()
        for line in changes:
            _LOG.warning("%s", line)
        if changes:
            self.waiters.notify()
        detail, outage_s = self.ends.backends.longest_outage()
        if outage_s > self.config.pause.max_outage_s:
            self._pause(f"an outage lasts for {outage_s:.0f} s: {detail}")

    def _pause(self, reason: str) -> None:
        """Stops training attempts from starting until a driver opens admission again."""
        if self.admission_open:
            _LOG.error("the run is paused: %s", reason)
            self.set_admission(False, reason, hold=True)

    def _has_lost_weights(self, evaluation: str) -> bool:
        """True when no engine serves the version of an evaluation, and one could take it."""
        pinned = self.evaluations.get(evaluation)
        if pinned.agent != "mini" or self.windows.phase:
            return False
        return not self._is_served(pinned.weight_version) and any(
            e.state in ("stale", "serving") and not self._is_adoptable(e)
            for e in self.pool.engines.values()
        )

    def _is_served(self, weight_version: int) -> bool:
        return any(
            e.state in ("serving", "updating") and e.weight_version == weight_version
            for e in self.pool.engines.values()
        )

    def _cancel_evaluations(self, weight_version: int) -> None:
        """After a publication: ends evaluations whose own version no engine serves any more."""
        for evaluation in self.evaluations.unfinished():
            pinned = evaluation.weight_version
            if evaluation.agent != "mini" or self._is_served(pinned):
                continue
            _LOG.warning("evaluation %s lost its weight_version %d", evaluation.name, pinned)
            for attempt in self.evaluations.cancel(evaluation.name, weight_version, self._clock()):
                self.ends.forget(attempt)
        self.waiters.notify()

    def _is_adoptable(self, engine: Engine) -> bool:
        """True when an engine's own weights, loaded from disk, are the published ones."""
        return (
            self.config.engines.load_format == "auto"
            and self.ledger.max_weight_version == _STARTED_WITH
            and engine.state == "stale"
        )

    def _engine_changed(self, engine: Engine) -> None:
        self._follow_window()
        self.admission.follow_engine(engine)
        if self._is_adoptable(engine) and engine.weight_version == 0:
            task = asyncio.create_task(self._adopt(engine, engine.incarnation))
            self._adoptions.add(task)
            task.add_done_callback(self._adoptions.discard)
        self.waiters.notify()

    async def _adopt(self, engine: Engine, incarnation: int) -> None:
        """Lets an engine serve the weights that it loaded at its start."""
        try:
            await self.pool.client(engine.name).set_weight_version(_STARTED_WITH)
        except RolloutError as error:
            await self.pool.report_failure(engine.name, str(error))
        else:
            self.pool.set_state(engine.name, "serving", incarnation, _STARTED_WITH)

    def _follow_window(self) -> None:
        self.admission.set_paused(bool(self.windows.phase))
        self.ends.windows.follow(bool(self.windows.phase), self._clock())
        if not self.windows.phase:
            self.waiters.notify()


def _checked_kind(request: pb.FinishAttemptRequest) -> CauseKind:
    kind = cause_kind(request.cause)
    if kind is None:
        raise BadRequestError(f"attempt {request.attempt_id}: cause {request.cause} ends nothing")
    if request.HasField("reward"):
        name = tpb.Cause.Name(request.cause)
        if kind is not CauseKind.SCORED:
            raise BadRequestError(
                f"attempt {request.attempt_id}: cause {name} is not scored, but a reward of "
                f"{request.reward} came with it; leave it unset"
            )
        if not 0.0 <= request.reward <= 1.0:
            raise BadRequestError(
                f"attempt {request.attempt_id}: got reward {request.reward}, wanted 0..1"
            )
    return kind
