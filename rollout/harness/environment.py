"""Harbor's environment on top of the SandboxBroker.

Owner: one trial. Harbor builds it by import path; `bind` then hands over the live objects,
because Harbor's configuration carries JSON only. It holds one sandbox at a time: the agent's,
then (after `replace`) the one for grading. Every exec is counted under the record's phase.

Network: a sandbox never has any, whatever the task asks, which is stricter than every policy
that Harbor knows.
"""

from __future__ import annotations

import asyncio
import shlex
import tarfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from harbor.environments.base import (
    BaseEnvironment,
    EnvironmentPath,
    ExecResult,
    HealthcheckError,
    transfer_tar_filter,
)
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)

from rollout.harness.attempt_record import AttemptRecord
from rollout.harness.changes import pack
from rollout.harness.config import HarnessConfig
from rollout.harness.errors import TaskFormatError
from rollout.harness.sandbox_session import SandboxSession
from rollout.harness.task_folder import LOG_DIRS, TaskFolder, Tree, read_file, read_tree
from sandbox.client import (
    BackendBusyError,
    BrokerAwayError,
    CapacityError,
    DeadlineError,
    SandboxClient,
    SandboxDiedError,
    SandboxError,
    StaleEpochError,
    UnknownLeaseError,
)
from sandbox.client import ExecResult as ClientExecResult

_CAPABILITIES = EnvironmentCapabilities(
    disable_internet=True,
    network_allowlist=True,
    network_allowlist_hostnames=True,
    network_allowlist_wildcard_hostnames=True,
    network_allowlist_ipv4_addresses=True,
    network_allowlist_ipv6_addresses=True,
    network_allowlist_ipv4_cidrs=True,
    network_allowlist_ipv6_cidrs=True,
)
_RESOURCES = EnvironmentResourceCapabilities(
    memory_limit=True, cpu_limit=True, fractional_cpus=True
)
_DEFAULT_TIMEOUT_S = 600.0
_AWAY = (BrokerAwayError, UnknownLeaseError, StaleEpochError)
"""Failures that tell of the broker and not of the attempt. A lease that is lost while it is being
renewed is one: the broker was restarted, or is too slow."""
_AWAY_AT_START = (*_AWAY, BackendBusyError, CapacityError, DeadlineError)
"""While a sandbox is being started these too: no attempt has touched it yet."""


class BrokerEnvironment(BaseEnvironment):
    """One trial's sandbox, leased from the broker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._session: SandboxSession | None = None
        super().__init__(*args, **kwargs)

    def bind(
        self,
        client: SandboxClient,
        config: HarnessConfig,
        record: AttemptRecord,
        folder: TaskFolder,
    ) -> None:
        """Hands over what Harbor cannot pass: the broker's client and the attempt's record."""
        self._client, self.config, self.record, self.folder = client, config, record, folder

    @staticmethod
    def type() -> str:
        """Name in Harbor's results."""
        return "swe_rl_broker"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What Harbor may ask of it."""
        return _CAPABILITIES

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Memory and CPU limits are the broker's."""
        return _RESOURCES

    def _validate_definition(self) -> None:
        """Images are the broker's: nothing is built here, so no Dockerfile is needed."""

    def is_path_mounted(self, environment_path: EnvironmentPath, host_path: Path) -> bool:
        """True for Harbor's own log folders, which spares their transfer.

        Agents run outside the sandbox and write no logs inside; the verifier fetches what it
        grades by itself.
        """
        return str(environment_path).startswith("/logs/")

    # ---- life cycle

    async def start(self, force_build: bool) -> None:
        """Leases the agent's sandbox and fills it. Raises HealthcheckError, TaskFormatError."""
        del force_build
        await self._open(self.folder.start_tar)

    async def stop(self, delete: bool) -> None:
        """Gives the sandbox back; never raises."""
        del delete
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def replace(self, tree: Tree, extra: dict[str, Tree]) -> None:
        """Swaps the sandbox for a fresh one that holds `tree` in the workdir, and `extra` roots."""
        await self.stop(delete=True)
        await self._open(pack({self.folder.workdir: tree, **extra}, LOG_DIRS))

    async def _open(self, tar: bytes) -> None:
        started = time.monotonic()
        folder = self.folder
        try:
            self._session = await SandboxSession.acquire(
                self._client,
                self.config.sandbox,
                image=folder.image,
                holder=self.record.attempt_id,
                workdir=folder.workdir,
                on_failure=self._failed,
                archive=tar,
                memory_bytes=folder.memory_bytes,
                cpu_cores=folder.cpu_cores,
            )
        finally:
            self.record.environment_s += time.monotonic() - started

    def _failed(self, error: SandboxError) -> None:
        """Keeps what the first failure of a sandbox was: in which phase, whose, how far it reached."""
        record = self.record
        if record.failed_phase:
            return
        starting = self._session is None
        record.failed_phase = record.phase.value
        record.sandbox_died = isinstance(error, SandboxDiedError)
        record.backend_away = isinstance(error, _AWAY_AT_START if starting else _AWAY)

    def session(self) -> SandboxSession:
        """The sandbox in use. Raises HealthcheckError when there is none."""
        if self._session is None:
            raise HealthcheckError(f"attempt {self.record.attempt_id} has no sandbox")
        return self._session

    # ---- commands

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        output_cap_bytes: int,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        merge_output: bool = False,
    ) -> ClientExecResult:
        """Runs a command and tells all that the broker knows of it. Raises HealthcheckError."""
        self.record.num_execs[self.record.phase] += 1
        resolved = self._resolve_user(user)
        try:
            return await self.session().execute(
                command,
                timeout_s=timeout_s,
                output_cap_bytes=output_cap_bytes,
                cwd=cwd or self.folder.workdir,
                env=self._merge_env(env),
                user="" if resolved in (None, 0, "root") else str(resolved),
                merge_output=merge_output,
            )
        except (TaskFormatError, UnicodeEncodeError):
            self.record.num_execs[self.record.phase] -= 1  # refused: it never reached a sandbox
            raise

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Harbor's own way to run a command (oracle, helpers); 124 stands for a timeout."""
        reply = await self.run(
            command,
            timeout_s=timeout_sec or _DEFAULT_TIMEOUT_S,
            output_cap_bytes=self.config.grading.output_cap_bytes,
            env=env,
            cwd=cwd,
            user=user,
        )
        return ExecResult(
            stdout=reply.stdout.decode("utf-8", "replace"),
            stderr=reply.stderr.decode("utf-8", "replace"),
            return_code=124 if reply.timed_out else reply.exit_code,
        )

    # ---- files

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies one file in."""
        directory, _, name = str(target_path).rpartition("/")
        await self.session().upload(pack({directory: {name: read_file(Path(source_path))}}), "/")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a folder's content in."""
        await self.session().upload(pack({str(target_dir): read_tree(Path(source_dir))}), "/")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies one file out."""
        content = await self.read_file(str(source_path))
        if content is None:
            raise FileNotFoundError(f"{source_path} is not a file in the sandbox")
        await asyncio.to_thread(_write_file, Path(target_path), content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies a folder's content out."""
        tar = await self.session().download(str(source_dir), self.config.grading.max_log_bytes)
        await asyncio.to_thread(_unpack, tar or b"", Path(target_dir))

    async def read_file(self, path: str) -> bytes | None:
        """A regular file's content, or None when there is none. Symbolic links are not followed."""
        tar = await self.session().download(path, self.config.grading.max_log_bytes)
        if not tar:
            return None
        try:
            with tarfile.open(fileobj=BytesIO(tar), mode="r:") as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isreg() else None
                    if stream is not None:
                        return stream.read()
        except tarfile.TarError as error:
            raise self.broken_archive(path, error) from error
        return None

    def broken_archive(self, path: str, error: tarfile.TarError) -> HealthcheckError:
        """The broker packs archives itself, outside the sandbox: a broken one is its failure."""
        self.record.failed_phase = self.record.failed_phase or self.record.phase.value
        return HealthcheckError(f"the broker's archive of {path} is broken: {error}")

    async def remove(self, paths: Sequence[str]) -> None:
        """Deletes paths relative to the workdir."""
        command = "rm -rf -- " + " ".join(shlex.quote(path) for path in paths)
        await self.run(command, timeout_s=60.0, output_cap_bytes=4096)


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _unpack(tar: bytes, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if tar:
        with tarfile.open(fileobj=BytesIO(tar), mode="r:") as archive:
            archive.extractall(target, filter=transfer_tar_filter)
