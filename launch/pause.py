"""A run that paused itself: what the user is told, how long it waits, how it goes on.

Owner: `launch`. The manager closes admission with a hold when failures pass their rates or an
outage does not end (rollout.config, PauseConfig); a guard of the trainer may do the same. The
attempts that are queued stay, the processes live, and `swe_rl resume` opens admission again.
Nobody may be there to do it, so the job ends after run.max_pause_s; `resume` then goes on
from the newest checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from launch.errors import JobFailed, UsageError
from launch.run_directory import RunDirectory
from proto import rollout_pb2, serving
from rollout.client import RolloutClient, RolloutError


class PauseWatch:
    """Looks at each status of the manager."""

    def __init__(
        self,
        run_name: str,
        max_pause_s: float,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notify` is told in one line of each pause and outage, and of its end."""
        self._name = run_name
        self._max_pause_s = max_pause_s
        self._notify = notify
        self._clock = clock
        self._paused_at_s: float | None = None
        self._outages: set[str] = set()

    def look(self, status: rollout_pb2.GetStatusReply) -> None:
        """Tells what changed. Raises JobFailed when a pause lasts longer than max_pause_s."""
        self._tell_outages(status)
        if not status.admission_held:
            if self._paused_at_s is not None:
                self._notify("the run goes on")
            self._paused_at_s = None
            return
        if self._paused_at_s is None:
            self._paused_at_s = self._clock()
            self._notify(
                f"the run is paused: {status.admission_reason}. Once that is put right, "
                f"`swe_rl resume {self._name}` lets it go on from where it is; after "
                f"{self._max_pause_s:.0f} s (run.max_pause_s) it ends, resumable"
            )
        if self._clock() - self._paused_at_s > self._max_pause_s:
            raise JobFailed(
                f"the run was paused for longer than run.max_pause_s = {self._max_pause_s:.0f} s: "
                f"{status.admission_reason}. `swe_rl resume {self._name}` goes on with it"
            )

    def _tell_outages(self, status: rollout_pb2.GetStatusReply) -> None:
        away = {b.name: b.detail for b in status.backends if b.state != "closed"}
        for name in sorted(away.keys() - self._outages):
            self._notify(
                f"outage: {away[name]}; nothing that needs it starts until a probe succeeds"
            )
        for name in sorted(self._outages - away.keys()):
            self._notify(f"outage over: {name}")
        self._outages = set(away)


async def let_go_on(run: RunDirectory) -> None:
    """Opens admission of a run that is paused under another process.

    Raises UsageError when there is no such process, or it is not paused.
    """
    busy = f"the run {run.root} is in use by another process"
    try:
        config = json.loads((run.processes / "worker.json").read_text())
        async with serving.dial(config["manager_address"]) as channel:
            rollout = RolloutClient(channel)
            if not (await rollout.get_status()).admission_held:
                raise UsageError(f"{busy}, and it is not paused")
            await rollout.set_admission(rollout_pb2.SetAdmissionRequest(open=True))
    except (OSError, ValueError, KeyError, RolloutError) as error:
        raise UsageError(f"{busy}, whose manager does not answer ({error})") from error
