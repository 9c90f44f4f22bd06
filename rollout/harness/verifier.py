"""Grading in a fresh sandbox.

Owner: one trial. This is a Harbor verifier (`VerifierConfig.import_path`), the plug-in point
that gets the agent's environment and returns the reward, under Harbor's verifier phase and
clock. The two other hooks lose: Harbor's "separate verifier environment" carries declared
artifacts only, not the agent's changes, and asks every task to opt in; reacting to the upload
of the tests inside the environment would leave the reward to a file of the sandbox.

    agent's sandbox: kill processes -> collect changes -> release, in one call
    fresh sandbox:   environment/ + changes + tests/ in one upload -> test.sh -> read the log
    worker:          reward from the log and tests/grading.json

With `grading.reuse_verdicts`, work equal to work graded before skips the fresh sandbox.

Tests that hang, die for memory or leave nothing to grade are run again in another fresh
sandbox, and the task's own solution is graded beside it: only if the failure repeats and the
solution passes is it the patch's doing.
"""

from __future__ import annotations

import tarfile
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier
from harbor.verifier.verifier import RewardFileNotFoundError

from rollout.harness.attempt_record import Phase
from rollout.harness.causes import AgentEnd, Verdict
from rollout.harness.changes import Changes, deleted_outside, graded_tree, select_changes
from rollout.harness.environment import BrokerEnvironment
from rollout.harness.errors import TransferTooLargeError
from rollout.harness.grading import reward_from_files
from rollout.harness.verdicts import digest
from rollout.tasks.grading import grade

TEST_COMMAND = "/tests/test.sh"
SOLVE_COMMAND = "/solution/solve.sh"
_CAPS = frozenset({AgentEnd.TURN_CAP, AgentEnd.TOKEN_CAP, AgentEnd.TIME_BUDGET, AgentEnd.LOOP})


_FIRST_SIGNAL_STATUS = 129
_NUM_SIGNALS = 64
"""A shell's status for a command that died of signal n is 128 + n."""


class Death(StrEnum):
    """How a run of the tests can fail to say anything."""

    HUNG = "hung"
    OOM = "oom"
    SILENT = "left nothing to grade"


@dataclass(frozen=True)
class TestRun:
    """One run of test.sh: a reward, or how it died."""

    reward: float | None
    death: Death | None
    exit_code: int


_REUSED = "equal work was graded before"


class FreshSandboxVerifier(BaseVerifier):
    """Grades what the agent left behind."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(self.environment, BrokerEnvironment):
            raise TypeError(f"this verifier needs a BrokerEnvironment, got {self.environment!r}")
        self._environment: BrokerEnvironment = self.environment

    async def verify(self) -> VerifierResult:
        """The reward of the agent's work.

        Raises HealthcheckError when a sandbox dies, RewardFileNotFoundError when the tests
        cannot be made to say anything and the patch is not shown to be the reason.
        """
        environment = self._environment
        record, config = environment.record, environment.config
        record.phase = Phase.VERIFIER
        started, environment_before = time.monotonic(), record.environment_s
        try:
            if record.agent_end in _CAPS and not config.grading.grade_capped:
                return self._graded(0.0)
            try:
                changes = await self._collect()
            except TransferTooLargeError as error:
                record.note(f"changes not graded: {error}")
                return self._graded(0.0)
            run = await self._first_run(changes)
            for _ in range(config.grading.reruns):
                if run.death is None:
                    break
                record.note(f"tests {run.death}, exit {run.exit_code}; run again")
                run = await self._run_tests(changes)
            if run.death is None:
                assert run.reward is not None
                return self._graded(run.reward)
            return await self._blame(run)
        finally:
            in_environment = record.environment_s - environment_before
            record.grading_environment_s += in_environment
            record.verifier_s += time.monotonic() - started - in_environment

    def _graded(self, reward: float, verdict: Verdict = Verdict.GRADED) -> VerifierResult:
        record = self._environment.record
        record.verdict, record.reward = verdict, reward
        return VerifierResult(rewards={"reward": reward})

    async def _collect(self) -> Changes:
        """Takes the changes in the agent's sandbox, which ends it."""
        environment = self._environment
        folder, session = environment.folder, environment.session()
        collected = await session.take_changes(
            folder.workdir, environment.config.sandbox.max_change_bytes
        )
        try:
            return select_changes(
                collected.archive,
                collected.deleted_paths,
                folder.environment_tree,
                folder.grading.is_restored,
            )
        except tarfile.TarError as error:
            raise environment.broken_archive(folder.workdir, error) from error

    async def _first_run(self, changes: Changes) -> TestRun:
        """Runs the tests, or takes what they said of equal work."""
        environment, record = self._environment, self._environment.record
        max_kept = environment.config.grading.reuse_verdicts
        if not max_kept:
            return await self._run_tests(changes)
        num_before = len(record.notes)

        async def graded() -> tuple[TestRun, str]:
            run = await self._run_tests(changes)
            return run, "; ".join(record.notes[num_before:])

        (run, said), is_reused = await environment.folder.verdicts.get(
            digest(changes), graded, lambda graded: graded[0].death is None, max_kept
        )
        if is_reused:
            record.note(f"{_REUSED}: {said}" if said else _REUSED)
        return run

    async def _run_tests(self, changes: Changes) -> TestRun:
        """Runs the tests on the changes in a fresh sandbox."""
        folder = self._environment.folder
        tree = graded_tree(folder.environment_tree, changes)
        await self._environment.replace(tree, {"/tests": folder.tests_tree})
        gone = deleted_outside(folder.environment_tree, changes)
        if gone:
            await self._environment.remove(gone)
        return await self._test()

    async def _test(self) -> TestRun:
        environment = self._environment
        settings = environment.config.grading
        reply = await environment.run(
            TEST_COMMAND,
            timeout_s=settings.test_timeout_s or self.task.config.verifier.timeout_sec,
            output_cap_bytes=settings.output_cap_bytes,
            env=self.task.config.verifier.env or None,
            user=self.task.config.verifier.user,
        )
        if reply.timed_out:
            return TestRun(None, Death.HUNG, reply.exit_code)
        try:
            reward = await self._reward(reply.stdout, truncated=reply.stdout_dropped_bytes > 0)
        except TransferTooLargeError as error:
            environment.record.note(f"the tests' log is not read: {error}")
            reward = None
        if reply.oom_killed and not reward:
            return TestRun(None, Death.OOM, reply.exit_code)
        # Killed by a signal before it could pass: not a verdict on the patch, but a death like any
        # other, which a second run beside the gold patch explains.
        killed = _FIRST_SIGNAL_STATUS <= reply.exit_code < _FIRST_SIGNAL_STATUS + _NUM_SIGNALS
        if reward is None or (killed and not reward):
            return TestRun(None, Death.SILENT, reply.exit_code)
        return TestRun(reward, None, reply.exit_code)

    async def _reward(self, stdout: bytes, truncated: bool) -> float | None:
        environment = self._environment
        spec = environment.folder.grading.spec
        if spec is None:
            as_json = await environment.read_file("/logs/verifier/reward.json")
            text = None if as_json else await environment.read_file("/logs/verifier/reward.txt")
            return reward_from_files(text, as_json)
        if spec.kind == "pytest":
            log = await environment.read_file(spec.log)
            if log is None:
                environment.record.note(f"tests left no {spec.log}")
                return None
            stdout, truncated = log, False
        graded = grade(spec, stdout.decode("utf-8", "replace"), truncated=truncated)
        if graded.reward != 1.0:
            environment.record.note(graded.detail)
        return graded.reward

    async def _blame(self, run: TestRun) -> VerifierResult:
        """The tests died twice: is it the patch? Decided by grading the task's own solution."""
        record, death = self._environment.record, run.death
        passed = await self._control() if self._environment.config.grading.gold_control else False
        record.note(f"tests {death} again, exit {run.exit_code}; gold control passed: {passed}")
        if not passed:
            record.verdict = Verdict.FAILED
            raise RewardFileNotFoundError(
                f"attempt {record.attempt_id}: tests {death} in {TEST_COMMAND}, and the task's "
                f"solution does not pass either (or there is none): check {self.task.task_dir}"
            )
        if death is Death.HUNG:
            return self._graded(0.0, Verdict.TESTS_HUNG)
        if death is Death.OOM:
            return self._graded(0.0, Verdict.TESTS_OOM)
        return self._graded(0.0)

    async def _control(self) -> bool:
        """True when the task's own solution gets reward 1 in a fresh sandbox."""
        environment, folder = self._environment, self._environment.folder
        if "solve.sh" not in folder.solution_tree:
            return False
        environment.record.phase = Phase.CONTROL
        try:
            roots = {"/solution": folder.solution_tree, "/tests": folder.tests_tree}
            await environment.replace(folder.environment_tree, roots)
            await environment.run(
                SOLVE_COMMAND,
                timeout_s=self.task.config.agent.timeout_sec or 600.0,
                output_cap_bytes=4096,
                env=self.task.config.solution.env or None,
            )
            await environment.session().kill_processes()
            run = await self._test()
        finally:
            environment.record.phase = Phase.VERIFIER
        return run.reward == 1.0
