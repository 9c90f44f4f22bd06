"""The native zygote as the local backend sees it: its process, packets and sandboxes' sockets.

Owner: the broker's event loop. The wire format is native/message.h's. The zygote dies with this
process (and by end of file on its socket), every sandbox dies with the zygote.
"""

from __future__ import annotations

import array
import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import (
    BackendBusyError,
    BackendSetupError,
    InvalidRequestError,
    SandboxDiedError,
)

MAX_PACKET_BYTES = 512 * 1024
_SOCKET_BYTES = 4 * 2**20
_START_TIMEOUT_S = 10.0
_MAX_FDS = 8

Value = str | int | Iterable[str]


def encode(kind: str, fields: Mapping[str, Value]) -> bytes:
    """A packet; a sequence of values repeats its key. Raises InvalidRequestError on NUL, size."""
    entries: list[str] = []
    for key, value in fields.items():
        values = [str(value)] if isinstance(value, str | int) else value
        entries += [f"{key}={item}" for item in values]
    if any("\0" in entry for entry in entries):
        raise InvalidRequestError("a NUL byte cannot be part of a command, path or environment")
    body = "".join(entry + "\0" for entry in entries)
    packet = (kind + body).encode(errors="surrogateescape")
    if len(packet) > MAX_PACKET_BYTES:
        raise InvalidRequestError(
            f"the request has {len(packet)} bytes, more than {MAX_PACKET_BYTES}: "
            "upload large content as files"
        )
    return packet


def decode(body: bytes) -> dict[str, str]:
    """The fields of a packet after its kind byte; the last of a repeated key wins."""
    entries = body.decode(errors="replace").split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if entry)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        for option in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE: past the host's default cap
            try:
                end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
            except PermissionError:
                break
    ours.setblocking(False)
    return ours, theirs


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = sock.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(_MAX_FDS * 4))
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, list(fds)


async def _readable(fd: int, timeout_s: float) -> bool:
    """True once fd can be read, False after timeout_s."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, set_ready)
    try:
        await asyncio.wait_for(ready, timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


@dataclass
class InitHandle:
    """A sandbox's init: its control socket and the descriptors that it handed over."""

    control: socket.socket
    root_fd: int
    upper_fd: int
    pid_fd: int

    async def kill(self, timeout_s: float) -> bool:
        """Kills init, and with it everything in its pid namespace; True once all are dead."""
        try:
            signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)
        except ProcessLookupError:
            return True
        return await _readable(self.pid_fd, timeout_s)

    def close(self) -> None:
        """Closes all descriptors."""
        self.control.close()
        for fd in (self.root_fd, self.upper_fd, self.pid_fd):
            os.close(fd)


class Zygote:
    """The zygote process."""

    def __init__(self, binary: Path, stage: Path) -> None:
        """Args: stage is an empty directory that it mounts over, in its own mount namespace."""
        self._binary = binary
        self._stage = stage
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._num_trees = 0

    @property
    def alive(self) -> bool:
        """False before start and once the process has died."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts it; call from the main thread. Raises BackendSetupError."""
        self._socket, theirs = _socket_pair()
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - once, and for a moment
                [str(self._binary), str(theirs.fileno()), str(self._stage)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={},  # sandboxes must not inherit the broker's secrets
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise BackendSetupError(f"cannot start {self._binary}: {error}") from error
        finally:
            theirs.close()
        try:
            await self._answer("start the zygote")
        except BackendSetupError:
            await self.close()
            raise

    async def shared_tree(self, lowers: Iterable[Path]) -> Path:
        """Mounts a read-only overlay, once for many sandboxes; returns where they find it."""
        async with self._lock:
            self._num_trees += 1
            name = f"tree-{self._num_trees}"
            packet = encode("I", {"name": name, "lower": [str(lower) for lower in lowers]})
            self._send(packet)
            await self._answer(f"mount {name}")
            return self._stage / name

    async def new_sandbox(self, fields: Mapping[str, Value], timeout_s: float) -> InitHandle:
        """Makes a sandbox. Raises SandboxDiedError, BackendBusyError."""
        ours, theirs = _socket_pair()
        try:
            self._send(encode("N", fields), theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            if not await _readable(ours.fileno(), timeout_s):
                raise BackendBusyError(f"a sandbox took more than {timeout_s:.0f} s to start")
            data, fds = _receive(ours)
        except BaseException:
            ours.close()
            raise
        if data[:1] != b"R" or len(fds) != 3:
            for fd in fds:
                os.close(fd)
            ours.close()
            reason = data[1:].decode(errors="replace") if data[:1] == b"F" else "its init died"
            raise SandboxDiedError(f"cannot make a sandbox: {reason}")
        return InitHandle(ours, *fds)

    async def close(self) -> None:
        """Ends it and all its sandboxes. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    def _send(self, packet: bytes, fd: int | None = None) -> None:
        if self._socket is None or not self.alive:
            raise SandboxDiedError("the zygote is not running")
        ancillary = (
            [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        )
        try:
            self._socket.sendmsg([packet], ancillary)
        except BlockingIOError as error:
            raise BackendBusyError("the zygote's queue is full", retry_after_s=0.1) from error
        except OSError as error:
            raise SandboxDiedError(f"the zygote has died: {error}") from error

    async def _answer(self, what: str) -> None:
        assert self._socket is not None, "started"
        if not await _readable(self._socket.fileno(), _START_TIMEOUT_S):
            raise BackendSetupError(f"cannot {what}: no answer within {_START_TIMEOUT_S:.0f} s")
        data, _ = _receive(self._socket)
        if data[:1] != b"R":
            reason = data[1:].decode(errors="replace") or "the zygote died"
            raise BackendSetupError(f"cannot {what}: {reason}")


class PacketReader:
    """Hands each packet of a sandbox's init to a callback, and its end (None) once."""

    def __init__(self, control: socket.socket, on_packet: Callable[[bytes | None], None]) -> None:
        self._control = control
        self._on_packet = on_packet
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fileno(), self._read)
        self._open = True

    def _read(self) -> None:
        while self._open:
            try:
                data, fds = _receive(self._control)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, fds = b"", []
            for fd in fds:
                os.close(fd)
            if not data:
                self.close()
                self._on_packet(None)
                return
            self._on_packet(data)

    def close(self) -> None:
        """Stops reading; the socket stays open. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._control.fileno())
