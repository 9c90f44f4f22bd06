"""The local backend: sandboxes of this host, made by the native zygote.

    LocalBackend --packets--> zygote --clone--> init (pid 1 of a sandbox) --fork--> command
         |                                        ^
         `-- cgroups, image layers                `-- LocalSandbox: commands, kills
                                                  `-- root and upper descriptors: files

Owner: the broker's event loop; archives are packed in a few threads, on duplicated descriptors,
so that a sandbox that is closed meanwhile can never hand them another's files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from sandbox.backends import archive, changes, rooted, zygote
from sandbox.backends.base import ExecOutcome, ExecSpec, SandboxLimits
from sandbox.backends.cgroup import (
    CgroupTree,
    SandboxCgroup,
    broker_name,
    owner_is_dead,
    process_start_ticks,
)
from sandbox.backends.image import ImageBuilder, ImageLayers
from sandbox.config import BrokerConfig, ImageConfig
from sandbox.errors import BackendSetupError, InvalidRequestError, SandboxDiedError

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CREATE_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 10.0
_REPLY_MARGIN_S = 15.0
"""Init answers a command this long after its deadline at the latest, or is taken for dead."""
_MAX_ARGUMENT_BYTES = 131_071
"""Linux's MAX_ARG_STRLEN, less the NUL."""
_BASE_ENV = {"LANG": "C.UTF-8", "TERM": "dumb"}
_ROOTFS_PREFIX = "rootfs:"


def default_init_binary() -> Path:
    """Where the build puts the native binary."""
    return Path(__file__).parent.parent / "native" / "sandbox_init"


class LocalBackend:
    """Implements Backend on namespaces, an overlay and cgroups of this host. Needs root."""

    name = "local"

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._broker = broker_name(
            os.getpid(), process_start_ticks(os.getpid()) or 0, secrets.token_hex(3)
        )
        self._directory = config.state_dir / self._broker
        self._images = ImageBuilder(self._directory / "images", config.hidden_usr, Path("/usr"))
        self._trees: dict[tuple[Path, ...], asyncio.Task[Path]] = {}
        self._cgroups: CgroupTree | None = None
        self._zygote: zygote.Zygote | None = None
        self._restarting = asyncio.Lock()
        self._doomed_cgroups: list[SandboxCgroup] = []
        self._num_sandboxes = 0
        self._threads = ThreadPoolExecutor(config.transfer_threads, "sandbox-transfer")

    async def start(self) -> None:
        """Sweeps what dead brokers left, starts the zygote. Raises BackendSetupError."""
        if os.geteuid() != 0:
            raise BackendSetupError(
                "the local sandbox backend needs root (namespaces, overlay, cgroups): run the "
                f"broker as root, got uid {os.geteuid()}"
            )
        binary = self._config.init_binary or default_init_binary()
        if not binary.is_file():
            raise BackendSetupError(
                f"sandbox_init is not at {binary}: build //sandbox/native:sandbox_init, "
                "or set init_binary"
            )
        try:
            _sweep_directories(self._config.state_dir)
            (self._directory / "stage").mkdir(parents=True, mode=0o700)
            self._images.build()
            for image in self._config.images.values():
                self._images.layers(image)
        except InvalidRequestError as error:
            await self.close()
            raise BackendSetupError(str(error)) from error
        except OSError as error:
            await self.close()
            raise BackendSetupError(
                f"cannot prepare {self._directory}: {error}; set state_dir to a local, "
                "writable directory"
            ) from error
        try:
            if self._config.cgroups:
                cgroups = CgroupTree.detect(self._config.cgroup_parent, self._broker)
                self._cgroups = cgroups
                cgroups.create()
            else:
                _log.warning("cgroups=false: memory, pids and cpu limits are not enforced")
            self._zygote = zygote.Zygote(binary, self._directory / "stage")
            await self._zygote.start()
        except BackendSetupError:
            await self.close()
            raise

    async def create(self, image: str, limits: SandboxLimits) -> LocalSandbox:
        """Makes a sandbox; see Backend."""
        layers = self._images.layers(self._image(image))
        await self._ensure_zygote()
        assert self._zygote is not None, "started"
        usr = await self._shared_usr(layers)
        self._bury()
        self._num_sandboxes += 1
        sandbox_id = f"sandbox-{self._num_sandboxes}"
        cgroup = None
        if self._cgroups is not None:
            cgroup = self._cgroups.sandbox(sandbox_id, with_cpu=limits.cpu_cores > 0)
        try:
            if cgroup is not None:
                cgroup.create(limits)
            handle = await self._zygote.new_sandbox(
                {
                    "lower": [str(lower) for lower in layers.lowers],
                    "usr": str(usr) if usr else "",
                    "bind": [f"{source}:{target}" for source, target in layers.binds],
                    "cgroup_procs": cgroup.procs_files() if cgroup else [],
                    "hostname": "sandbox",
                    "disk_bytes": self._config.disk_bytes,
                },
                _CREATE_TIMEOUT_S,
            )
        except BackendSetupError as error:
            self._discard(cgroup)
            raise SandboxDiedError(f"cannot make a sandbox: {error}") from error
        except BaseException:
            self._discard(cgroup)
            raise
        return LocalSandbox(
            sandbox_id, handle, cgroup, layers, self._config, self._threads, self._discard
        )

    async def close(self) -> None:
        """Kills all sandboxes and removes every trace. Idempotent."""
        if self._zygote is not None:
            await self._zygote.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for _ in range(50):
            if not self._bury():
                break
            await asyncio.sleep(0.02)
        if self._cgroups is not None:
            self._cgroups.remove()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _image(self, name: str) -> ImageConfig:
        image = self._config.images.get(name)
        if image is not None:
            return image
        if name.startswith(_ROOTFS_PREFIX):
            return ImageConfig(base=str(self._allowed_rootfs(name)))
        raise InvalidRequestError(
            f"image {name!r} is unknown: the broker's configuration has "
            f"{sorted(self._config.images)}"
        )

    def _allowed_rootfs(self, name: str) -> Path:
        path = Path(os.path.realpath(name.removeprefix(_ROOTFS_PREFIX)))
        parents = [Path(os.path.realpath(parent)) for parent in self._config.rootfs_parents]
        if not any(parent in path.parents for parent in parents):
            raise InvalidRequestError(
                f"image {name!r} is not below one of the broker's rootfs_parents "
                f"{[str(parent) for parent in parents]}"
            )
        return path

    async def _ensure_zygote(self) -> None:
        async with self._restarting:
            if self._zygote is None:
                raise SandboxDiedError("the local backend is closed")
            if not self._zygote.alive:
                _log.error("the zygote died, and every sandbox with it: starting another")
                await self._zygote.close()
                self._trees.clear()
                try:
                    await self._zygote.start()
                except BackendSetupError as error:
                    raise SandboxDiedError(str(error)) from error

    async def _shared_usr(self, layers: ImageLayers) -> Path | None:
        if not layers.usr_lowers:
            return None
        assert self._zygote is not None, "started"
        task = self._trees.get(layers.usr_lowers)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._zygote.shared_tree(layers.usr_lowers))
            self._trees[layers.usr_lowers] = task
        try:
            return await asyncio.shield(task)
        except BackendSetupError as error:
            raise SandboxDiedError(f"cannot mount an image: {error}") from error

    def _discard(self, cgroup: SandboxCgroup | None) -> None:
        """Removes a sandbox's cgroups now, or later when a process is still leaving them."""
        if cgroup is not None and not cgroup.remove():
            self._doomed_cgroups.append(cgroup)

    def _bury(self) -> int:
        """Tries again to remove cgroups; returns how many are left."""
        self._doomed_cgroups = [cgroup for cgroup in self._doomed_cgroups if not cgroup.remove()]
        return len(self._doomed_cgroups)


class LocalSandbox:
    """Implements Sandbox."""

    def __init__(
        self,
        sandbox_id: str,
        handle: zygote.InitHandle,
        cgroup: SandboxCgroup | None,
        layers: ImageLayers,
        config: BrokerConfig,
        threads: ThreadPoolExecutor,
        discard: Callable[[SandboxCgroup | None], None],
    ) -> None:
        self.sandbox_id = sandbox_id
        self._handle = handle
        self._cgroup = cgroup
        self._layers = layers
        self._config = config
        self._threads = threads
        self._discard = discard
        self._closing: asyncio.Task[None] | None = None
        self._alive = True
        self._lock = asyncio.Lock()
        self._output: dict[bytes, bytearray] = {}
        self._exec_reply: asyncio.Future[dict[str, str]] | None = None
        self._kill_replies: list[asyncio.Future[int]] = []
        self._oom_kills = 0
        self._reader = zygote.PacketReader(handle.control, self._on_packet)

    @property
    def alive(self) -> bool:
        """False once init has died or close has begun."""
        return self._alive

    async def prepare(self, limits: SandboxLimits, workdir: str) -> None:
        """See Sandbox. Raises InvalidRequestError when workdir cannot be made."""
        self._require_alive()
        if self._cgroup is not None:
            try:
                self._cgroup.set_limits(limits)
            except BackendSetupError as error:
                raise InvalidRequestError(f"cannot set limits {limits}: {error}") from error
        try:
            os.close(rooted.make_directories(self._handle.root_fd, rooted.normalise(workdir)))
        except OSError as error:
            raise InvalidRequestError(f"cannot make the workdir {workdir}: {error}") from error

    async def execute(self, spec: ExecSpec) -> ExecOutcome:
        """See Sandbox. Raises SandboxDiedError, InvalidRequestError."""
        packet = self._encode(spec)
        async with self._lock:
            self._require_alive()
            self._output = {b"O": bytearray(), b"E": bytearray()}
            reply = self._exec_reply = asyncio.get_running_loop().create_future()
            try:
                self._send(packet)
                fields = await self._await_exec(reply, spec.timeout_s)
            finally:
                self._exec_reply = None
            outcome = self._outcome(fields)
            if fields.get("stuck") == "1":
                self._die("a killed process of the sandbox does not end")
        return outcome

    async def kill_processes(self) -> int:
        """See Sandbox."""
        self._require_alive()
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._kill_replies.append(reply)
        self._send(zygote.encode("K", {}))
        return await asyncio.wait_for(reply, _REPLY_MARGIN_S)

    async def upload(self, target_dir: str, archive_file: BinaryIO) -> tuple[int, int]:
        """See Sandbox."""
        target_dir = rooted.normalise(target_dir)
        limit = self._config.max_transfer_bytes
        return await self._with_fds(
            lambda root, _: archive.unpack(root, target_dir, archive_file, limit)
        )

    async def download(self, path: str, max_bytes: int) -> BinaryIO:
        """See Sandbox."""
        path = rooted.normalise(path)
        return await self._with_fds(lambda root, _: archive.pack(root, path, max_bytes))

    async def collect_changes(self, path: str, max_bytes: int) -> tuple[BinaryIO, list[str]]:
        """See Sandbox."""
        path = rooted.normalise(path)
        lower = changes.LowerView(self._layers.lowers)
        return await self._with_fds(
            lambda root, upper: changes.collect(root, upper, lower, path, max_bytes)
        )

    async def close(self) -> None:
        """See Sandbox. Waits until every process is dead."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._die("the sandbox was closed")
        if not await self._handle.kill(_KILL_TIMEOUT_S):
            _log.error("%s: its init is still dying after %.0f s", self.sandbox_id, _KILL_TIMEOUT_S)
        self._handle.close()
        self._discard(self._cgroup)
        self._cgroup = None

    async def _with_fds(self, work: Callable[[int, int], T]) -> T:
        self._require_alive()
        root_fd, upper_fd = os.dup(self._handle.root_fd), os.dup(self._handle.upper_fd)

        def run() -> T:
            try:
                return work(root_fd, upper_fd)
            finally:
                os.close(root_fd)
                os.close(upper_fd)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _encode(self, spec: ExecSpec) -> bytes:
        env = {**_BASE_ENV, "PATH": self._config.path, **self._layers.env, **spec.env}
        for name, text in (("command", spec.command), *env.items()):
            size = len(text.encode(errors="surrogateescape"))
            if size > _MAX_ARGUMENT_BYTES:
                raise InvalidRequestError(
                    f"{name} has {size} bytes; the kernel takes {_MAX_ARGUMENT_BYTES} in one "
                    "argument: upload a file instead"
                )
            if not name or "=" in name:
                raise InvalidRequestError(f"environment name {name!r} is not valid")
        return zygote.encode(
            "C",
            {
                "command": spec.command,
                "cwd": rooted.normalise(spec.cwd),
                "user": spec.user,
                "env": [f"{name}={value}" for name, value in env.items()],
                "merge_output": int(spec.merge_output),
                "output_cap_bytes": spec.output_cap_bytes,
                "timeout_ms": int(spec.timeout_s * 1000),
                "grace_ms": int(self._config.output_grace_s * 1000),
            },
        )

    async def _await_exec(
        self, reply: asyncio.Future[dict[str, str]], timeout_s: float
    ) -> dict[str, str]:
        try:
            return await asyncio.wait_for(asyncio.shield(reply), timeout_s + _REPLY_MARGIN_S)
        except asyncio.CancelledError:
            # The caller has gone: the command is killed before anyone runs another.
            if self._alive:
                self._send(zygote.encode("A", {}))
                done, _ = await asyncio.wait({reply}, timeout=_REPLY_MARGIN_S)
                if not done:
                    self._die("a cancelled command does not end")
            raise
        except TimeoutError as error:
            self._die("init did not answer in time")
            raise SandboxDiedError(
                f"{self.sandbox_id}: init did not answer {_REPLY_MARGIN_S:.0f} s past the "
                "command's deadline"
            ) from error

    def _outcome(self, fields: dict[str, str]) -> ExecOutcome:
        oom_kills = self._cgroup.oom_kills() if self._cgroup else 0
        oom_killed = oom_kills > self._oom_kills
        self._oom_kills = oom_kills
        return ExecOutcome(
            stdout=bytes(self._output[b"O"]),
            stderr=bytes(self._output[b"E"]),
            exit_code=int(fields["exit_code"]),
            timed_out=fields["timed_out"] == "1",
            oom_killed=oom_killed,
            stdout_dropped_bytes=int(fields["stdout_dropped_bytes"]),
            stderr_dropped_bytes=int(fields["stderr_dropped_bytes"]),
            duration_s=int(fields["duration_us"]) / 1e6,
        )

    def _on_packet(self, packet: bytes | None) -> None:
        if packet is None:
            self._die("its init died")
            return
        kind, body = packet[:1], packet[1:]
        if kind in self._output:
            self._output[kind] += body
        elif kind == b"X" and self._exec_reply is not None and not self._exec_reply.done():
            self._exec_reply.set_result(zygote.decode(body))
        elif kind == b"K" and self._kill_replies:
            reply = self._kill_replies.pop(0)
            if not reply.done():
                reply.set_result(int(zygote.decode(body)["num_killed"]))
        elif kind == b"F":
            self._fail_exec(SandboxDiedError(f"{self.sandbox_id}: {body.decode(errors='replace')}"))

    def _fail_exec(self, error: SandboxDiedError) -> None:
        if self._exec_reply is not None and not self._exec_reply.done():
            self._exec_reply.set_exception(error)
            self._exec_reply.exception()  # marks it seen: its waiter may have been cancelled

    def _die(self, reason: str) -> None:
        """Nothing more goes to init; what waits for it fails. Resources stay until close."""
        if not self._alive:
            return
        self._alive = False
        self._reader.close()
        error = SandboxDiedError(f"{self.sandbox_id}: {reason}; acquire a new one")
        self._fail_exec(error)
        for reply in self._kill_replies:
            if not reply.done():
                reply.set_exception(error)

    def _require_alive(self) -> None:
        if not self._alive:
            raise SandboxDiedError(f"{self.sandbox_id} has died; acquire a new one")

    def _send(self, packet: bytes) -> None:
        try:
            self._handle.control.send(packet)
        except OSError as error:
            self._die(f"cannot reach its init ({error})")
            raise SandboxDiedError(f"{self.sandbox_id}: cannot reach its init: {error}") from error


def _sweep_directories(state_dir: Path) -> None:
    """Removes the work directories of dead brokers (their mounts died with them)."""
    for directory in state_dir.glob("swe_rl-*"):
        if owner_is_dead(directory.name, process_start_ticks):
            shutil.rmtree(directory, ignore_errors=True)


def sweep_leftovers(config: BrokerConfig) -> None:
    """Removes what dead brokers left on this machine. Raises BackendSetupError."""
    _sweep_directories(config.state_dir)
    if config.cgroups:
        CgroupTree.detect(config.cgroup_parent, f"swe_rl-{os.getpid()}").sweep()
