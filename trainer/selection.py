"""Evaluations during RL, and the best weights among them.

Every `every_steps` steps, before the first and after the last one, the trainer saves a
checkpoint, lets the manager evaluate the version that the engines serve on the dev tasks, and
keeps the score. No step is taken meanwhile, so that the version stands still on every engine;
rollouts go on as far as the staleness gate lets them. The checkpoint of the best score is never
deleted, and with `keep_best` the stage ends with its weights.

    metrics/selection.jsonl   one Candidate a line, of the surviving lineage

Owner: the trainer's main thread. Invariant: a candidate's checkpoint holds exactly the weights
that were evaluated. An evaluation that fails costs its score, never the stage.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from proto import rollout_pb2
from rollout.client import RolloutError
from trainer.config import PeriodicEvaluationConfig
from trainer.errors import CorruptCheckpointError, EvaluationFailedError, EvaluationLostError
from trainer.line_log import LineLog
from trainer.manager_link import ManagerLink

if TYPE_CHECKING:
    from trainer.stage_runner import StageRunner

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Weights that were evaluated."""

    step: int
    """RL steps done; 0: the weights that RL began with."""
    weight_version: int
    evaluation: str
    """Name of the evaluation at the manager."""
    temperature: float
    """Of its sampling."""
    pass_at_1: float
    """Mean over tasks of the mean reward of their scored attempts."""
    num_scored: int
    """Attempts with a reward."""
    duration_s: float
    """What the evaluation took; the trainer waited for it."""
    checkpoint: str
    """Name of the folder below checkpoints/."""


class SelectionLog:
    """The candidates of a run, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = LineLog(path)
        self._candidates: list[Candidate] = []

    def begin(self, completed_steps: int) -> None:
        """Reads the file and forgets candidates of steps that will be taken again."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        read = [candidate for line in lines if (candidate := _parse(line)) is not None]
        self._candidates = [c for c in read if c.step <= completed_steps]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(_line(c) + "\n" for c in self._candidates))
        partial.replace(self._path)

    def append(self, candidate: Candidate) -> None:
        """Adds a candidate."""
        self._candidates.append(candidate)
        self._lines.append(_line(candidate))

    def has(self, step: int) -> bool:
        """True when the weights of `step` have a score."""
        return any(c.step == step for c in self._candidates)

    def best(self) -> Candidate | None:
        """The highest score; of equals the latest, which has seen the most tasks."""
        return max(self._candidates, key=lambda c: (c.pass_at_1, c.step), default=None)


class Selection:
    """Evaluates when it is due, and chooses."""

    def __init__(
        self, runner: StageRunner, link: ManagerLink, config: PeriodicEvaluationConfig
    ) -> None:
        self._runner = runner
        self._link = link
        self._config = config
        self._log = SelectionLog(runner.config.run_dir / "metrics" / "selection.jsonl")

    def begin(self, completed_steps: int, num_steps: int) -> None:
        """Evaluates the weights that the stage starts or goes on with, if that is due."""
        if not self._config.every_steps:
            return
        self._log.begin(completed_steps)
        self._pin()
        self.after(completed_steps, num_steps)

    def after(self, step: int, num_steps: int) -> None:
        """Evaluates after `step` if that is due.

        Raises:
          StoppedError: the trainer was told to stop.
        """
        every = self._config.every_steps
        if not every or (step % every and step != num_steps) or self._log.has(step):
            return
        self._runner.publish_if_changed()
        checkpoint = self._runner.save_if_changed()
        if checkpoint is None:
            _log.warning("no checkpoint for a score of step %d, training goes on", step)
            return
        started = time.monotonic()
        reply = self._evaluate(step)
        if reply is None:
            return
        version, name = self._runner.weight_version, self._name(step)
        if reply.weight_version != version:
            _log.warning(
                "evaluation %s ran on weight_version %d, training goes on without its score",
                name,
                reply.weight_version,
            )
            return
        scores = [sum(task.rewards) / len(task.rewards) for task in reply.tasks if task.rewards]
        if not scores:
            _log.warning("evaluation %s: no attempt was scored, training goes on", name)
            return
        self._log.append(
            Candidate(
                step=step,
                weight_version=reply.weight_version,
                evaluation=name,
                temperature=self._config.temperature,
                pass_at_1=sum(scores) / len(scores),
                num_scored=sum(len(task.rewards) for task in reply.tasks),
                duration_s=time.monotonic() - started,
                checkpoint=checkpoint.name,
            )
        )
        self._pin()

    def end(self, num_steps: int) -> None:
        """Goes back to the best weights, unless they are the last or that is not wanted."""
        best = self._log.best() if self._config.every_steps else None
        if best is None or not self._config.keep_best or best.step == num_steps:
            return
        _log.info("the best of the stage is step %d: pass@1 %.3f", best.step, best.pass_at_1)
        try:
            self._runner.load_weights(best.checkpoint)
        except CorruptCheckpointError as error:
            _log.error("the stage ends with the weights of its last step: %s", error)
            return
        self._runner.publish_if_changed()

    def _name(self, step: int) -> str:
        return f"rl-step-{step}-v{self._runner.weight_version}"

    def _evaluate(self, step: int) -> rollout_pb2.GetEvaluationReply | None:
        """Evaluates the published version; None, with a warning, when that came to nothing."""
        for _ in range(self._config.max_tries):
            request = rollout_pb2.StartEvaluationRequest(
                name=self._name(step),
                pool=rollout_pb2.POOL_DEV,
                attempts_per_task=self._config.attempts_per_task,
                temperature=self._config.temperature,
                agent="mini",
            )
            try:
                return self._runner.wait(self._link.evaluate(request, self._config.timeout_s))
            except EvaluationLostError as error:
                _log.warning("publishing again for an evaluation: %s", error)
                self._runner.publish_to_stage()
            except (EvaluationFailedError, RolloutError) as error:
                _log.warning("no score of step %d, training goes on: %s", step, error)
                return None
        _log.warning(
            "no score of step %d, training goes on: %d tries", step, self._config.max_tries
        )
        return None

    def _pin(self) -> None:
        best = self._log.best()
        self._runner.pin_checkpoint("" if best is None else best.checkpoint)


def _line(candidate: Candidate) -> str:
    return json.dumps(dataclasses.asdict(candidate))


def _parse(line: str) -> Candidate | None:
    """None for a line cut by a crash: it is evaluated again."""
    try:
        return Candidate(**json.loads(line))
    except (ValueError, TypeError):
        return None
