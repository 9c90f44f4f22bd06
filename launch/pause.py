"""A run that paused itself: what the user is told, how long it waits, how it goes on.

Owner: `launch`. The manager closes admission with a hold when failures pass their rates or an
outage does not end (rollout.config, PauseConfig). The trainer starts no step after a guard tripped
(trainer.config, GuardsConfig), and has saved a checkpoint. The attempts that are queued stay, the
processes live, and `swe_rl resume` lets both go on. Nobody may be there to do it, so the job ends
after run.max_pause_s; `resume` then goes on from the newest checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import grpc.aio

from launch.errors import RunPaused, UsageError
from launch.run_directory import RunDirectory
from proto import rollout_pb2, serving, trainer_pb2
from rollout.client import RolloutClient, RolloutError
from trainer.client import TrainerClient


class PauseWatch:
    """Looks at each status of the manager and of the trainer."""

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

    def look(
        self, status: rollout_pb2.GetStatusReply, trainer: trainer_pb2.GetStatusReply | None = None
    ) -> None:
        """Tells what changed. Raises RunPaused when a pause lasts longer than max_pause_s.

        Args: trainer is None before its first answer.
        """
        self._tell_outages(status)
        guard = trainer.pause_reason if trainer is not None else ""
        reason = guard or (status.admission_reason if status.admission_held else "")
        if not reason:
            if self._paused_at_s is not None:
                self._notify("the run goes on")
            self._paused_at_s = None
            return
        limit = f"{self._max_pause_s:.0f} s"
        resume = f"`swe_rl resume {self._name}`"
        wider = f"`swe_rl resume {self._name} --trainer.rl.guards.BAND=VALUE` (or `off`)"
        if self._paused_at_s is None:
            self._paused_at_s = self._clock()
            what = f"the run is paused: {reason}."
            if guard:
                how = (
                    f"A checkpoint was saved. {resume} lets it go on as it is; to go on with a wider "
                    f"band, end it here and give {wider}; after {limit} (run.max_pause_s) it ends, "
                    "resumable"
                )
            else:
                how = (
                    f"Once that is put right, {resume} lets it go on from where it is; after {limit} "
                    "(run.max_pause_s) it ends, resumable"
                )
            self._notify(f"{what} {how}")
        if self._clock() - self._paused_at_s > self._max_pause_s:
            raise RunPaused(
                f"the run was paused for longer than run.max_pause_s = {limit}: {reason}. "
                f"{wider if guard else resume} goes on with it"
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
    """Lets a run go on that is paused under another process.

    Raises UsageError when there is no such process, or it is not paused.
    """
    busy = f"the run {run.root} is in use by another process"
    try:
        addresses = json.loads(run.addresses.read_text())
        async with serving.dial(addresses["manager"]) as channel:
            rollout = RolloutClient(channel)
            is_held = (await rollout.get_status()).admission_held
            if is_held:
                await rollout.set_admission(rollout_pb2.SetAdmissionRequest(open=True))
        async with serving.dial(addresses["trainer"]) as channel:
            trainer = TrainerClient(channel)
            is_paused = (await trainer.get_status()).state == trainer_pb2.STAGE_STATE_PAUSED
            if is_paused:
                await trainer.resume()
    except (OSError, ValueError, KeyError, RolloutError, grpc.aio.AioRpcError) as error:
        told = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        raise UsageError(f"{busy}, one of whose processes does not answer ({told})") from error
    if not is_held and not is_paused:
        raise UsageError(f"{busy}, and it is not paused")
