"""The harness worker: leases attempts, runs each as a Harbor trial, ends each with one cause.

Owner of: the attempts that it leases, their trials, one pool of HTTP connections to the
gateways, one channel to the broker and one to the manager.

    RolloutManager --LeaseAttempts--> lease loop --> attempt task (<= concurrency)
          ^                                            |  AttemptRunner.run: Harbor trial
          |                                            |    agent thread  -> gateways (HTTP)
          |<--RenewAttempts--- renew loop              |    environment   -> SandboxBroker (gRPC)
          |                      | lease lost: cancel  |    verifier      -> fresh sandbox
          `<--FinishAttempt----------------------------'

What blocks each loop: the lease loop waits for a free slot, then at the manager; the renew
loop sleeps; an attempt task waits for its trial, then for the manager to take the result.
A manager that does not answer is tried again, with pauses up to `backoff_max_s`; its restart
costs nothing but the attempts that it requeued, which the renew loop then abandons. A worker that
is started again takes over its name: with its first call the manager queues again what the
process before it held.
SIGTERM: no more leases, running trials are abandoned and reported as `interrupted`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from proto import rollout_pb2 as pb
from proto.serving import ClientSecurity, ServingError, dial, fail, run_service, termination_event
from rollout.client import DeadlineError, FencedError, NotFoundError, RolloutClient, RolloutError
from rollout.harness.config import HarnessConfig

_LOG = logging.getLogger("harness.worker")
_FIRST_PAUSE_S = 0.1


class Runner(Protocol):
    """What the worker needs of AttemptRunner. Cancelling `run` makes it return `interrupted`."""

    async def run(self, leased: pb.LeasedAttempt) -> pb.FinishAttemptRequest:
        """Runs one attempt to its end."""


class _Running:
    """One attempt in this worker."""

    def __init__(
        self, leased: pb.LeasedAttempt, trial: asyncio.Task[pb.FinishAttemptRequest]
    ) -> None:
        self.leased, self.trial = leased, trial
        self.expires_at_s = leased.expires_at.ToNanoseconds() / 1e9
        self.is_lost = False

    def abandon(self, lost: bool = False) -> None:
        self.is_lost = self.is_lost or lost
        self.trial.cancel()


class Worker:
    """The loops. `run` until `stop` is set."""

    def __init__(
        self,
        config: HarnessConfig,
        name: str,
        client: RolloutClient,
        runner: Runner,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args: clock gives Unix time in seconds, the one that the manager's expiries are in."""
        self._config, self._name, self._client, self._runner = config, name, client, runner
        self._clock = clock
        self._incarnation = secrets.token_hex(16)
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slot_freed = asyncio.Event()
        self.num_finished = 0
        self.num_lost = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Works until stop is set, then drains."""
        loops = [
            asyncio.create_task(self._lease_loop(), name="lease"),
            asyncio.create_task(self._renew_loop(), name="renew"),
        ]
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait([stopped, *loops], return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()  # a loop ends by a defect or a lost name only: raise it
        finally:
            stopped.cancel()
            loops[0].cancel()
            await self._drain()
            loops[1].cancel()

    async def _lease_loop(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            free = self._config.concurrency - len(self._running)
            if free <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            request = pb.LeaseAttemptsRequest(
                worker=self._name, max_attempts=free, incarnation=self._incarnation
            )
            try:
                reply = await self._client.lease_attempts(request, self._config.lease_wait_s)
            except DeadlineError:
                continue
            except FencedError:
                raise  # another process took the name: what we hold is lost, and we may not lease
            except RolloutError as error:
                _LOG.warning("no leases from the manager: %s: %s", type(error).__name__, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.backoff_max_s)
                continue
            if not reply.attempts:
                await asyncio.sleep(_FIRST_PAUSE_S)  # a manager that does not block is not spun on
            pause_s = _FIRST_PAUSE_S
            for leased in reply.attempts:
                self._start(leased)

    def _start(self, leased: pb.LeasedAttempt) -> None:
        old = self._running.get(leased.attempt_id)
        if old is not None:
            # Our lease ran out and the attempt came back to us: the old try is void.
            old.abandon(lost=True)
        trial = asyncio.create_task(self._runner.run(leased), name=f"trial-{leased.attempt_id}")
        running = self._running[leased.attempt_id] = _Running(leased, trial)
        task = asyncio.create_task(self._attempt(running), name=f"attempt-{leased.attempt_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attempt(self, running: _Running) -> None:
        attempt_id = running.leased.attempt_id
        try:
            request = await running.trial
            if running.is_lost:
                _LOG.warning("attempt %s: lease lost, result dropped", attempt_id)
                self.num_lost += 1
            else:
                await self._finish(request)
        except asyncio.CancelledError:
            # Abandoned before its first step: nothing ran, the lease expires at the manager.
            self.num_lost += 1
        finally:
            if self._running.get(attempt_id) is running:
                del self._running[attempt_id]
            self._slot_freed.set()

    async def _finish(self, request: pb.FinishAttemptRequest) -> None:
        """Offers the result until it is taken, refused, or finish_retry_s is over. Idempotent."""
        pause_s, give_up_at_s = _FIRST_PAUSE_S, self._clock() + self._config.finish_retry_s
        while True:
            try:
                await self._client.finish_attempt(request)
            except (FencedError, NotFoundError) as error:
                _LOG.warning("attempt %s: result refused: %s", request.attempt_id, error)
                self.num_lost += 1
                return
            except RolloutError as error:
                if self._clock() >= give_up_at_s:
                    _LOG.error("attempt %s: result dropped: %s", request.attempt_id, error)
                    self.num_lost += 1
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.backoff_max_s)
            else:
                self.num_finished += 1
                return

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self._config.renew_interval_s)
            await self.renew_once()

    async def renew_once(self) -> None:
        """Renews every lease; abandons those that are lost or ran out unrenewed."""
        held = list(self._running.values())
        if not held:
            return
        keys = [pb.AttemptKey(attempt_id=r.leased.attempt_id, epoch=r.leased.epoch) for r in held]
        try:
            reply = await self._client.renew_attempts(
                pb.RenewAttemptsRequest(worker=self._name, attempts=keys)
            )
        except RolloutError as error:
            _LOG.warning("leases not renewed: %s: %s", type(error).__name__, error)
            for running in held:
                if running.expires_at_s and running.expires_at_s < self._clock():
                    running.abandon(lost=True)
            return
        for running, is_held in zip(held, reply.held, strict=True):
            if is_held:
                running.expires_at_s = reply.expires_at.ToNanoseconds() / 1e9
            elif not running.trial.done():
                running.abandon(lost=True)

    async def _drain(self) -> None:
        """Abandons the trials and reports them, within drain_timeout_s."""
        for running in list(self._running.values()):
            running.abandon()
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=self._config.drain_timeout_s)
            for task in late:
                task.cancel()
            if late:
                _LOG.error("%d attempts were not reported within drain_timeout_s", len(late))
                await asyncio.wait(late, timeout=1.0)


async def _serve(config: HarnessConfig, name: str) -> None:
    # Imported here: Harbor and mini-swe-agent take seconds, and read their environment.
    from rollout.harness.attempt_runner import AttemptRunner
    from rollout.harness.gateway_client import GatewayClient
    from sandbox.client import SandboxClient

    _quiet_loggers(config.keep_trials)
    security = ClientSecurity.from_environment()
    stop = termination_event()
    pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="agent")
    gateway = GatewayClient(config)
    try:
        async with (
            dial(config.manager_address, security) as manager,
            dial(config.broker_address, security) as broker,
        ):
            client = RolloutClient(manager, call_timeout_s=config.rpc_timeout_s)
            runner = AttemptRunner(
                config, SandboxClient(broker, config.sandbox.control_timeout_s), gateway, pool
            )
            worker = Worker(config, name, client, runner)
            _LOG.info("worker %s serves, %d attempts at a time", name, config.concurrency)
            await worker.run(stop)
            _LOG.info("worker %s: %d finished, %d lost", name, worker.num_finished, worker.num_lost)
    finally:
        await gateway.close()
        pool.shutdown(wait=False, cancel_futures=True)


def main(argv: list[str] | None = None) -> int:
    """Runs a worker until SIGTERM. Returns the exit code; 2 for a bad configuration."""
    parser = argparse.ArgumentParser(prog="rollout.harness.worker", description="Harness worker.")
    parser.add_argument("--config", type=Path, required=True, help="JSON of HarnessConfig")
    parser.add_argument("--name", required=True, help="unique name of this worker")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        config = HarnessConfig.model_validate_json(args.config.read_bytes())
        config.trials_dir.mkdir(parents=True, exist_ok=True)
        _quiet_libraries(config.trials_dir)
        run_service(_serve(config, args.name))
    except FencedError as error:
        return fail(f"harness worker {args.name}: {error}")
    except (OSError, ValidationError, ServingError) as error:
        return fail(f"harness worker {args.name}, configuration {args.config}: {error}")
    return 0


def _quiet_loggers(keep_trials: bool) -> None:
    """Silences mini's line for every message, and Harbor's debugging unless trials are kept.

    After their import, which sets levels. Kept trials have Harbor's lines in their own log.
    """
    logging.getLogger("agent").setLevel(logging.CRITICAL)
    harbor = logging.getLogger("harbor.utils.logger")
    harbor.setLevel(logging.DEBUG if keep_trials else logging.ERROR)
    harbor.propagate = not keep_trials


def _quiet_libraries(folder: Path) -> None:
    """Keeps mini-swe-agent from printing and from reading the user's settings, litellm offline."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = str(folder / "mini-swe-agent")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
