"""Runs stages and requests on the trainer's main thread; RPC threads only leave wishes here.

    RPC thread                     main thread (run)
    run_stage, submit --queue-->   idle:   takes the next job
    pause, resume, stop            stage:  takes jobs between steps, and while it waits for
    status (a snapshot)                    a batch; never inside a step

Owns progress, and the first rank's GridWork: policy, optimizer, checkpoints. Torch is touched by the
main thread alone. Invariant: a job sees weights between two optimizer steps.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from proto import rollout_pb2
from rollout.client import RolloutError
from trainer import architecture, gap, hf_export, ranks
from trainer.checkpoint import Progress
from trainer.checkpoint_saver import Saved, in_thread
from trainer.config import TrainerConfig
from trainer.device import Device
from trainer.errors import (
    BadRequestError,
    CheckpointWriteError,
    PublishFailedError,
    StageConflictError,
    StoppedError,
    TrainerError,
)
from trainer.grid_work import GridWork
from trainer.manager_link import ManagerLink, PublishResult
from trainer.metrics_log import MetricsLog, StepRecord
from trainer.rl import RlStage
from trainer.sft import SupervisedStage
from trainer.team import Team
from trainer.throughput import Throughput
from trainer.version_steps import VersionSteps

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Kind = Literal["pretrain", "sft", "rl"]
State = Literal["idle", "running", "paused", "finished", "failed"]


@dataclasses.dataclass(frozen=True)
class StageRequest:
    """A stage to run; see RunStageRequest."""

    kind: Kind
    name: str
    data_path: str
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Status:
    """A snapshot for GetStatus."""

    state: State = "idle"
    stage: StageRequest | None = None
    step: int = 0
    weight_version: int = 0
    error: str = ""
    last_record: StepRecord | None = None
    finished_stages: tuple[str, ...] = ()
    num_parameters: int = 0
    latest_checkpoint: str = ""
    pause_reason: str = ""  # set while a guard holds the stage


class StageRunner:
    """The trainer without its network side."""

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        link: ManagerLink | None,
        start_save: Callable[[Callable[[], None]], None] = in_thread,
        team: Team | None = None,
    ) -> None:
        """Loads the newest sound checkpoint, else what is replayed, else the weights of model_dir.

        Args:
          start_save: runs the writing of a checkpoint beside training.
          team: of several ranks, of which this is the first.

        Raises:
          BadRequestError: model_dir or replay_of cannot be used.
        """
        self.config = config
        self._link = link
        self._team = team or Team(None)
        fetch = None if link is None else link.fetch
        self.work = GridWork(config, device, fetch, self._team, self._tell_saved, start_save)
        self.learner = self.work.learner
        self.throughput = Throughput(
            architecture.read_config(config.model_dir),
            config.peak_tflops * 1e12
            if config.peak_tflops
            else device.matmul_flops_per_s(getattr(torch, config.dtype)),
            ranks.num_ranks(),
        )
        self.metrics = MetricsLog(config.run_dir / "metrics")
        self._loaded = self.work.loaded
        self._progress = self._loaded.progress if self._loaded else Progress()
        self._checkpoints = self.work.checkpoints
        self._versions = VersionSteps(
            config.run_dir / "versions.jsonl",
            self._progress.weight_version if self._loaded is not None else 0,
        )
        # A replay takes the versions of the run that it replays.
        self._ages = (
            self._versions
            if config.replay_of is None
            else VersionSteps(config.replay_of / "versions.jsonl")
        )
        self._booked_updates = self.learner.num_updates  # updates that the progress counts
        self._is_sound = True  # False: an update may have been left half done
        # A signal handler calls `stop` on the main thread, which may hold the lock just then.
        self._lock = threading.RLock()
        self._published_updates = -1  # learner.num_updates at the last publication
        self.lineage = 0  # as the manager counts them; 0 before the first publication
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused = False
        self._pause_reason = ""
        self._stopping = False
        self._save_on_stop = False
        self._status = Status(
            weight_version=self._progress.weight_version,
            finished_stages=self._progress.finished_stages,
            num_parameters=self.work.num_parameters,
            latest_checkpoint=str(self._loaded.path) if self._loaded else "",
        )

    # ---- any thread ------------------------------------------------------------------

    def status(self) -> Status:
        """What the trainer is doing."""
        with self._lock:
            if not self._paused or self._status.state != "running":
                return self._status
            return dataclasses.replace(
                self._status, state="paused", pause_reason=self._pause_reason
            )

    def run_stage(self, request: StageRequest) -> int:
        """Starts a stage. Returns the steps that a loaded checkpoint has already done.

        Raises:
          BadRequestError: a request that cannot succeed.
          StageConflictError: another stage runs, or the last one failed.
        """
        if request.num_steps <= 0:
            raise BadRequestError(f"RunStage got num_steps {request.num_steps}, wanted 1 or more")
        if not _STAGE_NAME.fullmatch(request.name):
            raise BadRequestError(
                f"RunStage got the name {request.name!r}: files are named after it, so want up to 100 "
                "letters, digits, '.', '_' and '-', a letter or digit first"
            )
        if request.kind == "rl" and self._link is None:
            raise BadRequestError("an RL stage needs manager_address in the trainer's config")
        with self._lock:
            current = self._status.stage
            if request.name in self._status.finished_stages:
                done = self.metrics.since(request.name, 1)
                if done and done[-1].step < request.num_steps:
                    raise BadRequestError(
                        f"stage {request.name!r} ended after {done[-1].step} steps and is not taken "
                        f"up again for {request.num_steps}: give another name"
                    )
                return request.num_steps
            if self._status.state == "failed":
                raise StageConflictError(
                    f"stage failed: {self._status.error}; stop the trainer and start it again"
                )
            if self._status.state == "running" and current is not None:
                if (current.kind, current.name) == (request.kind, request.name):
                    return self._status.step
                raise StageConflictError(
                    f"stage {current.name!r} ({current.kind}) runs; wait until it ended to run "
                    f"{request.name!r} ({request.kind})"
                )
            if request.kind != "rl" and not Path(request.data_path).is_file():
                raise BadRequestError(
                    f"data_path {request.data_path!r} is no file: make one with "
                    "rollout.traces.import_jsonl or rollout.traces.build"
                )
            same = self._progress.stage == request.name
            completed = self._progress.stage_step if same else 0
            self._status = dataclasses.replace(
                self._status, state="running", stage=request, step=completed, error=""
            )
        self._jobs.put(lambda: self._run_stage(request, completed))
        return completed

    def submit(self, work: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        """Runs `work` on the main thread between steps."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed to the caller, whole
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def pause(self) -> None:
        """No step starts until `resume`."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Lets steps start again."""
        with self._lock:
            self._paused, self._pause_reason = False, ""
        self._wake()

    def stop(self, save_checkpoint: bool) -> None:
        """Ends after the current step; a wait for a batch is given up."""
        with self._lock:
            self._stopping = True
            self._save_on_stop = self._save_on_stop or save_checkpoint
        if self._link is not None:
            self._link.stop_retrying()
        self._wake()

    # ---- main thread -----------------------------------------------------------------

    def run(self) -> None:
        """Serves jobs until `stop`, then saves if that was asked and something is unsaved.

        Weights that are ahead of the progress, because their batch was never acknowledged, are
        not saved: the batch comes again, and would be trained on top of itself.
        """
        while not self._stopping:
            self._jobs.get()()
        self._end_saves()
        if self._save_on_stop and self._progress != self._checkpoints.saved:
            if self._is_sound and self.learner.num_updates == self._booked_updates:
                self._save_at_the_end()
            else:
                _log.warning("the last step was not finished: its weights are not saved")
        self.metrics.close()
        self._team.dismiss()

    @property
    def weight_version(self) -> int:
        """The version that was published last."""
        return self._progress.weight_version

    def aged(self, versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See VersionSteps.aged; as seen from the version that was published last."""
        return self._ages.aged(versions, self._progress.weight_version)

    def take_version(self, weight_version: int) -> None:
        """Goes on as the version of a recorded step, in a replay."""
        self._advance(weight_version=weight_version)

    def publish_to_stage(self) -> int:
        """Publishes once, for a stage that goes on whatever happens. Returns the version, or 0.

        Engines that got nothing keep serving their version, or ask for a publication through
        NextBatch once they are up. Trying again at once would only use up version numbers.
        """
        try:
            return self._publish_once().weight_version
        except PublishFailedError as error:
            _log.warning("publication failed, training goes on: %s", error)
            return 0

    def publish_if_changed(self) -> None:
        """As publish_to_stage, unless the engines were given these very weights already."""
        if self._published_updates != self.learner.num_updates:
            self.publish_to_stage()

    def publish(self) -> PublishResult:
        """Publishes the current weights as a new version; tries for `manager_retry_s`.

        Raises:
          BadRequestError: no manager is configured.
          PublishFailedError: no engine took them in time.
          RolloutError: the manager refused.
        """
        self._check_sound()
        delay_s, give_up = 1.0, time.monotonic() + self.config.manager_retry_s
        while True:
            try:
                return self._publish_once()
            except PublishFailedError as error:
                if time.monotonic() + delay_s > give_up or self._stopping:
                    raise
                _log.warning("publication failed, next try in %.0f s: %s", delay_s, error)
                time.sleep(delay_s)
                delay_s *= 2

    def wait(self, future: concurrent.futures.Future[_T]) -> _T:
        """Waits for something from the event loop, serving jobs meanwhile; then heeds a pause.

        Raises:
          StoppedError: the trainer was told to stop; the future is cancelled.
        """
        future.add_done_callback(lambda _: self._wake())
        while not future.done() or (self._paused and not self._stopping):
            if self._stopping:
                future.cancel()
                break
            self._jobs.get()()
        self._check_stop()
        return future.result()

    def step_done(self, record: StepRecord, batch_id: str = "") -> None:
        """Books a step: metrics, progress, the periodic checkpoint, then jobs that wait.

        Args: batch_id is of the batch that an RL step trained.
        """
        changes: dict[str, Any] = {"stage": record.stage, "stage_step": record.step}
        if self._status.stage is not None and self._status.stage.kind == "rl":
            changes["rl_step"] = record.step
            changes["batch_ids"] = (*self._progress.batch_ids[: record.step - 1], batch_id)
        self._advance(**changes)
        self._booked_updates = self.learner.num_updates
        self.work.poll_save()
        scalars = record.scalars | self._checkpoints.take_scalars()
        record = dataclasses.replace(record, scalars=scalars)
        self.metrics.append(record)
        with self._lock:
            self._status = dataclasses.replace(self._status, step=record.step, last_record=record)
            request = self._status.stage
        last = request is not None and record.step >= request.num_steps
        every = getattr(self.config, request.kind).checkpoint_every_steps if request else 0
        if every and record.step % every == 0 and not last:
            self.work.save_periodic(self._progress)
        while self._paused or not self._jobs.empty():
            if self._stopping:
                break
            self._jobs.get()()
        if not last:
            self._check_stop()

    def hold(self, reason: str) -> None:
        """Saves a checkpoint of the moment and waits until `resume`, serving jobs meanwhile.

        Raises:
          StoppedError: the trainer was told to stop.
        """
        self.save_if_changed()
        with self._lock:
            self._paused, self._pause_reason = True, reason
        while self._paused and not self._stopping:
            self._jobs.get()()
        self._check_stop()

    def save(self) -> Path:
        """Writes a checkpoint of the moment, durably, and tells the manager during RL.

        Raises:
          CheckpointWriteError: it could not be written.
        """
        self._check_sound()
        return self.work.save(self._progress)

    def save_if_changed(self) -> Path | None:
        """The checkpoint of the moment, after a save unless there is one.

        Returns None when it could not be written and the run goes on.

        Raises:
          CheckpointWriteError: it could not be written and trainer.checkpoint.on_failure is "stop".
        """
        return self.work.save_of_the_moment(self._progress)

    def pin_checkpoint(self, name: str) -> None:
        """Keeps the checkpoint `name`, and no other, from being deleted with the oldest."""
        self.work.store.pinned = name

    def load_weights(self, name: str) -> None:
        """Takes the weights of the checkpoint `name`; the optimizer and progress stay.

        Raises:
          CorruptCheckpointError: it does not verify.
        """
        self.work.load_weights(name)
        self._published_updates = -1

    def export(self, path: Path) -> tuple[int, int]:
        """Writes a Hugging Face folder; returns (tensors, bytes)."""
        if not path.is_absolute():
            raise BadRequestError(f"Export wants an absolute path, got {path}")
        for mine in (self.config.run_dir, self.config.model_dir):
            if mine.resolve().is_relative_to(path.resolve()):
                raise BadRequestError(f"Export to {path} would replace {mine}: name another path")
        hf_export.check_replaceable(path)
        self._check_sound()
        with contextlib.closing(self.work.export()) as tensors:
            return hf_export.write(
                tensors, self.config.model_dir, path, self.config.export_shard_bytes
            )

    def measure_gap(self, attempt_ids: list[str], weight_version: int) -> gap.Gap:
        """See MeasureGap."""
        self._check_sound()
        return self.work.measure_gap(attempt_ids, weight_version)

    # ---- inside ----------------------------------------------------------------------

    def _publish_once(self) -> PublishResult:
        if self._link is None:
            raise BadRequestError("publishing needs manager_address in the trainer's config")
        self._begin_lineage(self._link)
        # A version is never used twice, even when its window failed.
        self._advance(weight_version=self._progress.weight_version + 1)
        self._versions.add(self._progress.weight_version, self.learner.num_updates)
        result = self._link.publish(self.work.export(), self._progress.weight_version)
        self._published_updates = self.learner.num_updates
        return result

    def _tell_saved(self, saved: Saved) -> None:
        """Shows a new checkpoint, and during RL tells the manager."""
        with self._lock:
            self._status = dataclasses.replace(self._status, latest_checkpoint=str(saved.path))
            stage = self._status.stage
        if stage is not None and stage.kind == "rl" and self._link is not None:
            oldest = min(p.rl_step for p in self.work.store.progress_of_newest())
            self._link.report_checkpoint(
                rollout_pb2.ReportCheckpointRequest(
                    step=saved.progress.rl_step, oldest_kept_step=oldest
                )
            )

    def _end_saves(self) -> None:
        """Waits for the save in flight; nothing about it fails what ends here."""
        try:
            self.work.settle_save()
        except RolloutError as error:  # the checkpoint is on disk; the manager is going too
            _log.warning("a checkpoint was not reported: %s", error)

    def _save_at_the_end(self) -> None:
        try:
            self.save()
        except RolloutError as error:  # as above
            _log.warning("the last checkpoint was not reported: %s", error)
        except CheckpointWriteError as error:
            _log.error("steps since the newest checkpoint are lost: %s", error)

    def _begin_lineage(self, link: ManagerLink) -> None:
        """Once a process, before its first publication: goes back to the loaded checkpoint.

        Batches newer than it are ready again, and versions published after it was written are
        never used twice.
        """
        if self.lineage:
            return
        reply = link.rewind(
            rollout_pb2.RewindRequest(
                step=self._progress.rl_step,
                lineage_token=uuid.uuid4().hex,
                batch_ids=self._progress.batch_ids,
            )
        )
        self._advance(weight_version=max(self._progress.weight_version, reply.max_weight_version))
        self.lineage = reply.lineage

    def _run_stage(self, request: StageRequest, completed: int) -> None:
        try:
            self._begin(request, completed)
            stage: Any
            if request.kind == "rl":
                assert self._link is not None
                stage = RlStage(self, self._link, request.name)
            else:
                stage = SupervisedStage(self, request.name)
            stage.run(completed, request.num_steps)
            finished = (*self._progress.finished_stages, request.name)
            self._advance(stage=request.name, finished_stages=finished)
            self.save()
            self._set_state("finished", finished_stages=finished)
        except StoppedError:
            self._set_state("idle")
        except (TrainerError, RolloutError, OSError) as error:
            _log.error("stage %s failed: %s", request.name, error)
            self._set_state("failed", error=f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - the process stays up to be asked why
            self._is_sound = False
            _log.exception("stage %s failed", request.name)
            self._set_state("failed", error=f"{type(error).__name__}: {error}")
            if ranks.num_ranks() > 1:
                # Nobody knows where the others are: a collective that waits for them may never end.
                _log.error("the ranks are out of step, and the trainer ends")
                os._exit(1)
        finally:
            self._end_saves()

    def _begin(self, request: StageRequest, completed: int) -> None:
        self.work.begin_stage(
            request.kind, request.name, request.data_path, request.num_steps, self._progress
        )
        self._booked_updates = self.learner.num_updates
        if not completed:
            self._advance(stage=request.name, stage_step=0)
        self.metrics.begin_stage(request.name, completed)

    def _advance(self, **changes: Any) -> None:
        self._progress = dataclasses.replace(self._progress, **changes)
        with self._lock:
            self._status = dataclasses.replace(
                self._status, weight_version=self._progress.weight_version
            )

    def _set_state(self, state: State, **changes: Any) -> None:
        with self._lock:
            self._status = dataclasses.replace(self._status, state=state, **changes)

    def _check_sound(self) -> None:
        """Raises StageConflictError for weights that are not those of a step that was booked."""
        if not self._is_sound or self.learner.num_updates != self._booked_updates:
            raise StageConflictError(
                "the last step was not finished, and its weights are not the run's: stop the trainer "
                "and start it again, which goes on from the newest checkpoint"
            )

    def _wake(self) -> None:
        self._jobs.put(lambda: None)

    def _check_stop(self) -> None:
        if self._stopping:
            raise StoppedError("the trainer was told to stop")
