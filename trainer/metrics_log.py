"""A run's metrics: kept in memory for streams, appended to JSONL, and to TensorBoard events.

    metrics/<stage>.jsonl       one flat object a step: stage, step, weight_version,
                                finished_at (Unix seconds), staleness_histogram, scalars by name;
                                of RL steps also spans: [part, begin, end] (Unix seconds)
    metrics/events/<stage>/     the same scalars for TensorBoard

Owner: the trainer's main thread writes; any thread may read `since` and be notified. A full disk
costs TensorBoard's events, until the next stage, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.line_log import LineLog
from trainer.step_clock import Span

_log = logging.getLogger(__name__)
_RESERVED = ("stage", "step", "weight_version", "finished_at", "staleness_histogram")
_SPANS = "spans"


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step's metrics."""

    stage: str
    step: int  # from 1
    weight_version: int  # published after this step; 0: not published
    finished_at: float  # Unix seconds
    scalars: dict[str, float]
    staleness_histogram: dict[int, int] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    """When each part of the step was, in order; empty where nobody asks."""

    def to_json(self) -> str:
        """One JSONL line, flat. Scalars that are not finite are left out: JSON has none."""
        fields = dataclasses.asdict(self)
        scalars = fields.pop("scalars")
        if not self.spans:
            del fields[_SPANS]
        return json.dumps(fields | {k: v for k, v in scalars.items() if math.isfinite(v)})

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Reads a line of `to_json`."""
        fields = json.loads(line)
        reserved = {name: fields.pop(name) for name in _RESERVED}
        histogram = {int(k): int(v) for k, v in reserved.pop("staleness_histogram").items()}
        spans = [(str(part), float(a), float(b)) for part, a, b in fields.pop(_SPANS, [])]
        return cls(**reserved, staleness_histogram=histogram, scalars=fields, spans=spans)


class MetricsLog:
    """All stages' metrics of a run."""

    def __init__(self, folder: Path) -> None:
        """Args: folder is made if needed; a stage's file is read when the stage begins."""
        self._folder = folder
        self._lock = threading.Lock()
        self._records: dict[str, list[StepRecord]] = {}
        self._listeners: set[Callable[[], None]] = set()
        self._lines: dict[str, LineLog] = {}
        self._events: Any = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin_stage(self, stage: str, completed_steps: int) -> None:
        """Keeps the records of completed steps and drops later ones, which will be redone."""
        path = self._path(stage)
        if lines_before := self._lines.pop(stage, None):
            lines_before.close()
        kept = []
        if path.exists():
            lines = path.read_text().splitlines()
            kept = [r for r in map(_parse, lines) if r is not None and r.step <= completed_steps]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(r.to_json() + "\n" for r in kept))
        partial.replace(path)
        with self._lock:
            self._records[stage] = kept
        self._close_events()
        self._begin_events(stage, completed_steps)

    def append(self, record: StepRecord) -> None:
        """Adds a step and wakes the listeners."""
        lines = self._lines.setdefault(record.stage, LineLog(self._path(record.stage)))
        lines.append(record.to_json())
        self._append_events(record)
        with self._lock:
            self._records.setdefault(record.stage, []).append(record)
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def since(self, stage: str, from_step: int) -> list[StepRecord]:
        """Records of a stage with step >= from_step, in order."""
        with self._lock:
            records = self._records.get(stage)
            if records is None and self._path(stage).exists():
                lines = self._path(stage).read_text().splitlines()
                records = [r for r in map(_parse, lines) if r is not None]
                self._records[stage] = records
            return [r for r in records or [] if r.step >= from_step]

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` from the writing thread after each append."""
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stops calling `listener`."""
        with self._lock:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Writes what is unwritten and closes the event files."""
        for lines in self._lines.values():
            lines.close()
        self._close_events()

    def _begin_events(self, stage: str, completed_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._events = SummaryWriter(
                str(self._folder / "events" / stage), purge_step=completed_steps + 1
            )
        except OSError as error:
            _log.warning("TensorBoard shows nothing of this stage: %s", error)

    def _append_events(self, record: StepRecord) -> None:
        if self._events is None:
            return
        try:
            for name, value in record.scalars.items():
                self._events.add_scalar(name, value, record.step, record.finished_at)
            self._events.flush()
        except OSError as error:
            _log.warning("TensorBoard shows no more of this stage: %s", error)
            self._close_events()

    def _close_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(OSError):  # what failed before fails again
                events.close()

    def _path(self, stage: str) -> Path:
        return self._folder / f"{stage}.jsonl"


def _parse(line: str) -> StepRecord | None:
    """None for a line cut by a crash: its step is not in any checkpoint."""
    try:
        return StepRecord.from_json(line)
    except (ValueError, KeyError):
        return None
