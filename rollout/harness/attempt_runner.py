"""Runs one leased attempt as a Harbor trial and says how it ended.

Owner: the worker. Whatever happens inside, `run` returns one FinishAttemptRequest with
exactly one cause; only cancellation leaves it without a trial to speak of, and then the
request says `interrupted`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from harbor.trial.hooks import TrialEvent, TrialHookEvent

from proto import rollout_pb2, trajectory_pb2
from rollout.harness.agent import MiniAgent, mini_version
from rollout.harness.attempt_record import AttemptRecord, Phase
from rollout.harness.causes import AgentEnd, Classified, classify, is_explained
from rollout.harness.config import HarnessConfig
from rollout.harness.environment import BrokerEnvironment
from rollout.harness.errors import TaskFormatError
from rollout.harness.gateway_client import GatewayClient
from rollout.harness.profile import Profile
from rollout.harness.task_folder import TaskFolder, TaskFolders
from rollout.harness.trajectory import to_atif, write_atif
from rollout.harness.trial import BUILT_IN_AGENTS, LeanTrial, trial_config
from sandbox.client import SandboxClient

_LOG = logging.getLogger(__name__)
KNOWN_AGENTS = BUILT_IN_AGENTS | {"mini"}


class AttemptRunner:
    """Everything that attempts of one worker share."""

    def __init__(
        self,
        config: HarnessConfig,
        broker: SandboxClient,
        gateway: GatewayClient,
        pool: Executor,
    ) -> None:
        self._config, self._broker, self._gateway, self._pool = config, broker, gateway, pool
        self._profiles = {name: Profile(name, p) for name, p in config.profiles.items()}
        sandbox = config.sandbox
        self._folders = TaskFolders(
            sandbox.default_image, sandbox.default_workdir, sandbox.upload_cache_bytes
        )

    async def run(self, leased: rollout_pb2.LeasedAttempt) -> rollout_pb2.FinishAttemptRequest:
        """Runs the attempt to its end. Cancelling it abandons the trial: `interrupted`."""
        started = time.monotonic()
        record = _new_record(leased)
        exception_type: str | None = None
        try:
            exception_type = await self._run_trial(leased, record)
        except asyncio.CancelledError:
            # The worker cancels only to abandon; the caller wants the request all the same.
            record.abandoned = True
        except TaskFormatError as error:
            exception_type = type(error).__name__
            record.note(str(error))
        except Exception as error:  # noqa: BLE001 - a defect in one trial must not end the worker
            exception_type = type(error).__name__
            record.note(f"{error}")
            _LOG.exception("attempt %s: trial raised", record.attempt_id)
        classified = classify(record.evidence(exception_type))
        self._write_trajectory(record, classified)
        return _finish(record, classified, time.monotonic() - started)

    async def _run_trial(
        self, leased: rollout_pb2.LeasedAttempt, record: AttemptRecord
    ) -> str | None:
        """The name of the exception that Harbor recorded, or None."""
        if record.agent not in KNOWN_AGENTS:
            raise TaskFormatError(
                f"agent {record.agent!r} is unknown: want one of {sorted(KNOWN_AGENTS)}"
            )
        folder = self._folders.get(Path(leased.task_path))
        profile = self._profile(folder)
        name = f"{record.attempt_id}-{record.epoch}"
        trial = LeanTrial(trial_config(self._config, folder, record.agent, name), folder)
        try:
            assert isinstance(trial.agent_environment, BrokerEnvironment)
            trial.agent_environment.bind(self._broker, self._config, record, folder)
            if isinstance(trial.agent, MiniAgent):
                trial.agent.bind(self._gateway, self._pool, self._config, record, profile)
            _follow_phases(trial, record)
            result = await trial.run()
        finally:
            if not self._config.keep_trials:
                shutil.rmtree(trial.trial_dir, ignore_errors=True)
        if result.exception_info is None:
            return None
        record.note(f"{result.exception_info.exception_message}"[:1000])
        if not is_explained(result.exception_info.exception_type):
            _LOG.error(
                "attempt %s: failure without an explanation\n%s",
                record.attempt_id,
                result.exception_info.exception_traceback,
            )
        return result.exception_info.exception_type

    def _profile(self, folder: TaskFolder) -> Profile:
        name = folder.profile or self._config.default_profile
        if name not in self._profiles:
            raise TaskFormatError(
                f"{folder.path}/task.toml asks for profile {name!r}: "
                f"the worker has {sorted(self._profiles)}"
            )
        return self._profiles[name]

    def _write_trajectory(self, record: AttemptRecord, classified: Classified) -> None:
        if self._config.trajectories_dir is None:
            return
        outcome: dict[str, Any] = {
            "cause": trajectory_pb2.Cause.Name(classified.cause),
            "reward": classified.reward,
            "evidence": classified.evidence,
        }
        trajectory = to_atif(record, self._config.model_name, mini_version, outcome)
        if trajectory is None:
            return
        try:
            write_atif(self._config.trajectories_dir, record.attempt_id, trajectory)
        except OSError as error:
            # To read later; what is trained lies with the manager. A full disk costs no attempt.
            _LOG.warning("attempt %s: its trajectory was not written: %s", record.attempt_id, error)


def _new_record(leased: rollout_pb2.LeasedAttempt) -> AttemptRecord:
    budget = (
        leased.time_budget.ToTimedelta().total_seconds() if leased.HasField("time_budget") else None
    )
    return AttemptRecord(
        attempt_id=leased.attempt_id,
        epoch=leased.epoch,
        task_id=leased.task_id,
        agent=leased.agent or "mini",
        session_key=leased.session_key,
        max_turns=leased.caps.max_turns,
        time_budget_s=budget,
    )


def _follow_phases(trial: LeanTrial, record: AttemptRecord) -> None:
    started = time.monotonic()

    async def agent_starts(_: TrialHookEvent) -> None:
        nonlocal started
        started = time.monotonic()
        record.phase = Phase.AGENT

    async def agent_ended(_: TrialHookEvent) -> None:
        record.agent_s = time.monotonic() - started
        if record.agent in BUILT_IN_AGENTS and trial.result.exception_info is None:
            record.agent_end = AgentEnd.RETURNED

    trial.add_hook(TrialEvent.AGENT_START, agent_starts)
    trial.add_hook(TrialEvent.AGENT_END, agent_ended)


def _seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(max(0.0, value) * 1000))
    return duration


def _finish(
    record: AttemptRecord, classified: Classified, total_s: float
) -> rollout_pb2.FinishAttemptRequest:
    known_s = record.environment_s + record.model_s + record.tool_s + record.verifier_s
    verifier_commands = record.num_execs[Phase.VERIFIER] + record.num_execs[Phase.CONTROL]
    report = rollout_pb2.AttemptReport(
        num_model_calls=record.num_model_calls,
        num_commands=record.num_execs[Phase.AGENT],
        num_verifier_commands=verifier_commands,
        num_execs=record.num_execs.total(),
        environment_time=_seconds(record.environment_s),
        grading_environment_time=_seconds(record.grading_environment_s),
        model_time=_seconds(record.model_s),
        tool_time=_seconds(record.tool_s),
        verifier_time=_seconds(record.verifier_s),
        overhead_time=_seconds(total_s - known_s),
        evidence=classified.evidence,
        backend_away=classified.backend_away,
    )
    request = rollout_pb2.FinishAttemptRequest(
        attempt_id=record.attempt_id, epoch=record.epoch, cause=classified.cause, report=report
    )
    if classified.reward is not None:
        request.reward = classified.reward
    return request
