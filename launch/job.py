"""The main job: from nothing to a table of base, SFT and RL on held-out tasks.

Owner of the order of things and of `state.json`; every step below is skipped when the state
says that it is done, so that `resume` is the same call again.

    prepare   tasks, tokenizer, sequences, initial weights        (one-shot programs)
    start     broker -> manager (starts engines) -> gateways -> workers; trainer
    pretrain  trainer stage -> publish -> evaluate `base`
    sft       trainer stage -> publish -> evaluate `sft` -> probe engine against trainer
    rl        open admission, trainer stage (publishes itself, evaluates on the dev tasks at
              intervals and ends with its best weights), close admission
              -> evaluate `rl` -> export, counters, attempts, overlap, report
    compare   the engines alone on RL's trajectories, once every side's counts are taken

The supervisor guards the whole: a process that fails for good ends the job with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import grpc.aio
from rich.console import Console
from rich.markup import escape

from launch import collect, programs, throughput
from launch.deploy import Deployment
from launch.errors import JobFailed
from launch.evaluation import (
    evaluate,
    evaluation_name,
    is_evaluated,
    load_evaluations,
    record_periodic,
)
from launch.monitor import Monitor
from launch.overlap import Timeline
from launch.pause import PauseWatch
from launch.recipe import Recipe
from launch.run_directory import RunDirectory, write_json
from launch.task_index import add_tasks, read_index
from proto import rollout_pb2, trainer_pb2
from rollout.client import DeadlineError, RolloutClient, RolloutError, UnavailableError
from trainer.client import TrainerClient

T = TypeVar("T")
_POLL_S = 0.5
_DRAIN_TIMEOUT_S = 300.0
_PASSING = (UnavailableError, DeadlineError, aiohttp.ClientError, TimeoutError)
"""What calls to the manager and over HTTP raise while their process is away."""


class Job:
    """One run of the main job in one run directory."""

    def __init__(
        self, recipe: Recipe, run: RunDirectory, deployment: Deployment, console: Console
    ) -> None:
        self._recipe = recipe
        self._run = run
        self._deployment = deployment
        self._console = console
        self._state: dict[str, Any] = run.load_state()

    async def run(self) -> None:
        """Runs to the end. Raises LaunchError; the state then tells where `resume` goes on.

        A run that is over stays as it is: nothing is started, no count is overwritten.
        """
        if self._state.get("finished"):
            return
        async with self._step("prepare"):
            await programs.prepare(self._recipe, self._run)
        async with self._deployment.running(self._notify) as (rollout, trainer):
            metrics = self._run.metrics
            interval = self._recipe.run.status_interval_s
            async with Monitor(rollout, trainer, metrics, interval, self._console) as self._monitor:
                with _told_in_one_line():
                    await self._deployment.supervisor.guard(self._watched_stages(rollout, trainer))

    def _notify(self, message: str) -> None:
        self._console.print(f"[yellow]{escape(message)}[/yellow]", highlight=False, soft_wrap=True)

    async def _watched_stages(self, rollout: RolloutClient, trainer: TrainerClient) -> None:
        """The stages, ended early by what is no process of ours to guard: engines, a pause."""
        if (await self._patiently(rollout.get_status)).admission_held:
            # Paused when it ended last; whoever resumes it wants it to go on.
            opened = rollout_pb2.SetAdmissionRequest(open=True)
            await self._patiently(lambda: rollout.set_admission(opened))
        stages = asyncio.create_task(self._stages(rollout, trainer))
        watch = asyncio.create_task(self._watch(rollout, trainer))
        try:
            await asyncio.wait({stages, watch}, return_when=asyncio.FIRST_COMPLETED)
            await (stages if stages.done() else watch)
        finally:
            for task in (stages, watch):
                task.cancel()
            await asyncio.gather(stages, watch, return_exceptions=True)

    async def _watch(self, rollout: RolloutClient, trainer: TrainerClient) -> None:
        """Raises JobFailed when an engine failed for good or a pause lasts too long."""
        max_pause_s = self._recipe.run.max_pause_s
        pause = PauseWatch(self._run.root.name, max_pause_s, self._notify)
        learner: trainer_pb2.GetStatusReply | None = None
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                learner = await trainer.get_status()
            with contextlib.suppress(UnavailableError, DeadlineError):
                status = await rollout.get_status()
                pause.look(status, learner)
                for engine in status.engines:
                    if engine.state == "failed":
                        raise JobFailed(
                            f"engine {engine.name} failed: {_decisive(engine.detail)} "
                            f"(log: {self._run.logs / engine.name}.log)"
                        )
            await asyncio.sleep(_POLL_S)

    async def _stages(self, rollout: RolloutClient, trainer: TrainerClient) -> None:
        recipe, data = self._recipe, self._run.data
        tasks = read_index(self._run.tasks / "index.json")
        await self._patiently(lambda: add_tasks(rollout, tasks))
        pretrain, sft = trainer_pb2.STAGE_KIND_PRETRAIN, trainer_pb2.STAGE_KIND_SFT
        rows = data / "pretrain.sequences"
        await self._train(trainer, pretrain, "pretrain", recipe.pretrain.num_steps, rows)
        await self._evaluate(rollout, trainer, "base")
        rows = data / "sft.sequences"
        await self._train(trainer, sft, "sft", recipe.sft.num_steps, rows)
        await self._evaluate(rollout, trainer, "sft")
        await self._probe(trainer)
        await self._reinforce(rollout, trainer)
        await record_periodic(rollout, self._run.metrics)
        await self._evaluate(rollout, trainer, "rl")
        async with self._step("finish"):
            await self._finish(rollout, trainer)
        await self._compare(rollout)
        self._state["finished"] = True
        self._run.save_state(self._state)

    async def _train(
        self,
        trainer: TrainerClient,
        kind: trainer_pb2.StageKind,
        name: str,
        num_steps: int,
        data: Any = "",
    ) -> None:
        """Runs a stage to its end, unless the trainer's checkpoint says that it is over."""
        if name in (await self._patiently(trainer.get_status)).finished_stages:
            return
        async with self._step(name):
            began_before = (self._run.metrics / f"{name}.jsonl").exists()
            completed = await self._patiently(
                lambda: trainer.run_stage(kind, name, num_steps, str(data))
            )
            if began_before:
                self._note_resume(name, completed, num_steps)
            await self._stage_end(trainer, kind, name, num_steps, data)

    async def _stage_end(
        self,
        trainer: TrainerClient,
        kind: trainer_pb2.StageKind,
        name: str,
        num_steps: int,
        data: Any,
    ) -> None:
        while True:
            status = await self._patiently(trainer.get_status)
            if name in status.finished_stages:
                return
            if status.state == trainer_pb2.STAGE_STATE_FAILED:
                raise JobFailed(f"stage {name} failed at step {status.step}: {status.error}")
            if status.state == trainer_pb2.STAGE_STATE_IDLE:
                # The trainer was restarted: it goes on from its newest checkpoint.
                completed = await self._patiently(
                    lambda: trainer.run_stage(kind, name, num_steps, str(data))
                )
                self._note_resume(name, completed, num_steps)
            await asyncio.sleep(_POLL_S)

    def _note_resume(self, stage: str, completed: int, num_steps: int) -> None:
        """Says where a stage that had begun goes on, and marks the RL step in the report."""
        where = f"from the checkpoint of step {completed}" if completed else "without a checkpoint"
        self._notify(f"{stage} goes on at step {completed + 1} of {num_steps}, {where}")
        if stage == "rl":
            self._state.setdefault("resumed_at_steps", []).append(completed)
            self._run.save_state(self._state)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call that may be repeated, again and again while its process is being restarted.

        Whether a process may be restarted is the supervisor's to say; it ends the job if not.
        """
        deadline = time.monotonic() + self._recipe.run.start_timeout_s
        while True:
            try:
                return await call()
            except (*_PASSING, grpc.aio.AioRpcError) as error:
                if not _is_passing(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _wait_for_engines(self, rollout: RolloutClient) -> None:
        """Until every engine can take an update. An engine's own start deadline bounds the wait."""
        deadline = time.monotonic() + self._recipe.run.start_timeout_s
        async with self._step("engines"):
            while True:
                engines = (await self._patiently(rollout.get_status)).engines
                if engines and all(engine.state in ("stale", "serving") for engine in engines):
                    return
                if time.monotonic() > deadline:
                    raise JobFailed(
                        f"engines were not up in time; see {self._run.logs}, or raise run.start_timeout_s"
                    )
                await asyncio.sleep(_POLL_S)

    async def _evaluate(self, rollout: RolloutClient, trainer: TrainerClient, stage: str) -> None:
        """Evaluates the trainer's weights, which are those of `stage`, on the held-out tasks."""
        settings = self._recipe.evaluation
        plan = [(1.0, settings.attempts_per_task)] + ([(0.0, 1)] if settings.greedy else [])
        if all(is_evaluated(self._run.metrics, stage, temperature) for temperature, _ in plan):
            return
        await self._wait_for_engines(rollout)
        await self._publish(rollout, trainer, stage)
        async with self._step(f"evaluate {stage}"):
            for temperature, attempts_per_task in plan:
                result = await evaluate(
                    rollout,
                    self._run.metrics,
                    stage=stage,
                    temperature=temperature,
                    attempts_per_task=attempts_per_task,
                    flush_before=True,
                    timeout_s=settings.timeout_s,
                    republish=lambda: self._patiently(trainer.publish),
                )
                if not any(task["rewards"] for task in result["tasks"]):
                    await self._explain_unscored(rollout, result, stage, temperature)

    async def _explain_unscored(
        self, rollout: RolloutClient, result: dict[str, Any], stage: str, temperature: float
    ) -> None:
        """An evaluation without one score is no result. Raises JobFailed with an attempt's evidence."""
        causes = Counter(cause for task in result["tasks"] for cause in task["causes"])
        name = evaluation_name(stage, temperature)
        attempts = await self._patiently(lambda: rollout.list_attempts(name))
        evidence = next((a.report.evidence for a in attempts if a.report.evidence), "none given")
        told = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        raise JobFailed(
            f"no attempt of the evaluation of {stage} was scored ({told}); the first said: "
            f"{evidence[:300]} (logs: {self._run.logs})"
        )

    async def _publish(self, rollout: RolloutClient, trainer: TrainerClient, stage: str) -> None:
        """Publishes, unless every engine serves what the trainer published last."""
        status = await self._patiently(rollout.get_status)
        published = (await self._patiently(trainer.get_status)).weight_version
        serving = all(
            e.state == "serving" and e.weight_version == published for e in status.engines
        )
        if stage == "rl" and published and serving:
            return  # each RL step publishes itself
        async with self._step(f"publish {stage}"):
            await self._patiently(trainer.publish)

    async def _probe(self, trainer: TrainerClient) -> None:
        """Compares the SFT evaluation's log-probs, sampled after a flush, with the trainer's."""
        path = self._run.metrics / "probe.json"
        if path.exists():
            return
        async with self._step("probe"):
            evaluation = json.loads((self._run.metrics / "evaluations.json").read_text())["sft-t1"]
            attempts = [attempt for task in evaluation["tasks"] for attempt in task["attempt_ids"]]
            version = evaluation["weight_version"]
            gap = await self._patiently(lambda: trainer.measure_gap(attempts, version))
            if gap.num_tokens < self._recipe.evaluation.probe_min_tokens:
                raise JobFailed(
                    f"the probe compared {gap.num_tokens} tokens, fewer than "
                    f"evaluation.probe_min_tokens = {self._recipe.evaluation.probe_min_tokens}"
                )
            write_json(
                path,
                {
                    "weight_version": version,
                    "num_tokens": gap.num_tokens,
                    "mean_abs_nats": gap.mean_abs_nats,
                    "max_abs_nats": gap.max_abs_nats,
                },
            )

    async def _reinforce(self, rollout: RolloutClient, trainer: TrainerClient) -> None:
        if "rl" in (await self._patiently(trainer.get_status)).finished_stages:
            return
        opened = rollout_pb2.SetAdmissionRequest(open=True)
        await self._patiently(lambda: rollout.set_admission(opened))
        kind = trainer_pb2.STAGE_KIND_RL
        await self._train(trainer, kind, "rl", self._recipe.rl.num_steps)
        closed = rollout_pb2.SetAdmissionRequest(open=False, reason="the rl stage is over")
        await self._patiently(lambda: rollout.set_admission(closed))
        await self._drain(rollout)

    async def _drain(self, rollout: RolloutClient) -> None:
        """Until the attempts under way have ended, so that every side's counts are final."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        async with self._step("drain"):
            while time.monotonic() < deadline:
                status = await self._patiently(rollout.get_status)
                if not status.num_attempts_running and not status.num_attempts_queued:
                    return
                await asyncio.sleep(_POLL_S)
        raise JobFailed(
            f"attempts under way did not end within {_DRAIN_TIMEOUT_S:.0f} s of the rl stage"
        )

    async def _finish(self, rollout: RolloutClient, trainer: TrainerClient) -> None:
        metrics, staleness = self._run.metrics, self._recipe.rl.max_staleness
        await self._patiently(lambda: trainer.export(str(self._run.export)))
        await self._patiently(lambda: collect.attempts(rollout, metrics))
        await self._patiently(lambda: collect.counters(rollout, self._deployment, metrics))
        await self._patiently(lambda: collect.restarts(rollout, self._deployment, metrics))
        if self._turns_are_kept:
            await self._patiently(lambda: collect.overlap(rollout, metrics, staleness))

    @property
    def _turns_are_kept(self) -> bool:
        return bool(self._recipe.rollout.get("keep_consumed_tokens", True))

    async def _compare(self, rollout: RolloutClient) -> None:
        """Sets RL's rate beside that of the engines alone. A run whose comparison fails is told so
        and stays as good as it was.
        """
        settings, metrics = self._recipe.evaluation, self._run.metrics
        evaluations = load_evaluations(metrics)
        async with self._step("generate only"):
            try:
                await throughput.measure(
                    self._run,
                    self._deployment.manager_address,
                    await self._patiently(lambda: collect.every_attempt(rollout, evaluations)),
                    Timeline(collect.rl_steps(metrics)),
                    num_trajectories=settings.generate_only_trajectories * self._turns_are_kept,
                    concurrency=self._deployment.num_slots,
                    time_limit_s=settings.generate_only_time_limit_s,
                )
            except JobFailed as error:
                self._notify(f"the engines' rate without RL was not measured: {error}")

    @asynccontextmanager
    async def _step(self, name: str) -> AsyncIterator[None]:
        """Names what the job does now and keeps how long it took."""
        monitor = getattr(self, "_monitor", None)
        if monitor is not None:
            monitor.stage = name
        started = time.monotonic()
        yield
        took = time.monotonic() - started
        if took < 0.05:
            return
        self._console.print(f"[green]done[/green] {name} in {took:.1f} s", highlight=False)
        self._state.setdefault("stages", []).append({"name": name, "duration_s": took})
        self._run.save_state(self._state)


def _is_passing(error: Exception) -> bool:
    """True when the same call may succeed once the process called is up again."""
    if isinstance(error, grpc.aio.AioRpcError):
        passing = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return error.code() in passing
    return isinstance(error, _PASSING)


@contextlib.contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Turns a refusal of the manager or the trainer that nothing else handled into JobFailed."""
    try:
        yield
    except RolloutError as error:
        raise JobFailed(f"the manager: {error} ({type(error).__name__})") from error
    except grpc.aio.AioRpcError as error:
        raise JobFailed(f"the trainer: {error.details()} ({error.code().name})") from error


def _decisive(detail: str) -> str:
    """An engine's detail without the log around it: what happened, and the line that says why."""
    first, *log = [line.strip() for line in detail.splitlines() if line.strip()] or [
        "no reason given"
    ]
    told = [line for line in log if "error" in line.lower()] or log
    return f"{first.partition('; last lines of')[0]}: {told[-1]}" if told else first
