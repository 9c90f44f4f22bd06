"""Small in-process servers for the harness's tests: a broker, a gateway, a manager.

The broker runs commands of the test's own tasks as this user, in a folder that stands for the
sandbox's root: /app, /tests, /logs and /solution in commands and scripts are mapped into it.
It isolates nothing. `broker_test` uses the real one.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
import tarfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from proto import rollout_pb2, rollout_pb2_grpc, sandbox_pb2, sandbox_pb2_grpc

_MAPPED = re.compile(rb"(?<![\w./-])/(app|tests|logs|solution)\b")


@dataclass
class Box:
    """One fake sandbox."""

    lease_id: str
    root: Path
    image: str
    num_execs: int = 0
    is_dead: bool = False


class FakeBroker(sandbox_pb2_grpc.SandboxBrokerServicer):
    """See the module. `intercept(box, command)` may answer an Exec instead of running it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boxes: dict[str, Box] = {}
        self.num_acquired = 0
        self.num_execs = 0
        self.commands: list[str] = []
        self.is_away = False
        """Answers nothing, as a broker whose process is gone."""
        self.refusal = ""
        """Name of the error with which Acquire is refused."""
        self.corrupt_archives = False
        self.intercept: Callable[[Box, str], sandbox_pb2.ExecReply | None] = lambda box, command: (
            None
        )

    def _map(self, box: Box, data: bytes) -> bytes:
        return _MAPPED.sub(lambda m: str(box.root).encode() + b"/" + m[1], data)

    async def _box(self, request: Any, context: grpc.aio.ServicerContext) -> Box:
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
        box = self.boxes.get(request.lease_id)
        if box is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no lease {request.lease_id}")
            raise AssertionError
        if box.is_dead:
            await _died(context)
        return box

    async def Acquire(self, request: Any, context: Any) -> sandbox_pb2.AcquireReply:
        if self.refusal:
            name = (("swe-rl-error", self.refusal),)
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "refused", trailing_metadata=name
            )
        if request.image == "unknown":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such image")
        lease_id = uuid.uuid4().hex[:12]
        box = Box(lease_id, self.folder / lease_id, request.image)
        (box.root / request.workdir.strip("/")).mkdir(parents=True)
        self._unpack(box, box.root, request.archive)
        self.boxes[lease_id] = box
        self.num_acquired += 1
        return sandbox_pb2.AcquireReply(lease=sandbox_pb2.Lease(lease_id=lease_id, epoch=1))

    async def Renew(self, request: Any, context: Any) -> sandbox_pb2.RenewReply:
        await self._box(request, context)
        return sandbox_pb2.RenewReply()

    async def Release(self, request: Any, context: Any) -> sandbox_pb2.ReleaseReply:
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
        box = self.boxes.pop(request.lease_id, None)
        if box is not None:
            _kill_all(box)
            shutil.rmtree(box.root, ignore_errors=True)
        return sandbox_pb2.ReleaseReply(existed=box is not None)

    async def Exec(self, request: Any, context: Any) -> sandbox_pb2.ExecReply:
        box = await self._box(request, context)
        if "\0" in request.command:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "NUL in the command")
        box.num_execs += 1
        self.num_execs += 1
        self.commands.append(request.command)
        reply = self.intercept(box, request.command)
        await self._box(request, context)  # it may have gone meanwhile
        if reply is not None:
            return reply
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            self._map(box, request.command.encode()).decode(),
            cwd=self._map(box, request.cwd.encode()).decode(),
            env={"PATH": os.environ["PATH"], **request.env, "FAKE_BOX": box.lease_id},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if request.merge_output else asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        timeout_s = request.timeout.ToNanoseconds() / 1e9
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, asyncio.CancelledError):
                raise
            return sandbox_pb2.ExecReply(timed_out=True, exit_code=137)
        code = process.returncode or 0
        # As the contract says: 128 + n for death by signal n.
        code = code if code >= 0 else 128 - code
        return sandbox_pb2.ExecReply(stdout=out, stderr=err or b"", exit_code=code)

    async def Upload(self, request_iterator: Any, context: Any) -> sandbox_pb2.UploadReply:
        first: Any = None
        data = bytearray()
        async for message in request_iterator:
            first = first or message
            data += message.tar_chunk
        box = await self._box(first, context)
        root = Path(self._map(box, first.target_dir.encode()).decode())
        self._unpack(box, box.root if first.target_dir == "/" else root, bytes(data))
        return sandbox_pb2.UploadReply()

    def _unpack(self, box: Box, root: Path, archive: bytes) -> None:
        if not archive:
            return
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            tar.extractall(root, filter="tar")
        for path in (box.root / "tests").rglob("*"):
            if path.is_file():
                mode = path.stat().st_mode
                path.write_bytes(self._map(box, path.read_bytes()))
                path.chmod(mode)

    async def Download(self, request: Any, context: Any) -> AsyncIterator[sandbox_pb2.TarChunk]:
        box = await self._box(request, context)
        path = box.root / request.path.strip("/")
        if not path.exists():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no {request.path}")
        data = _tar(path, path.name if path.is_file() else ".")
        if request.max_bytes and len(data) > request.max_bytes:
            name = (("swe-rl-error", "TooLargeError"),)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, "too large", trailing_metadata=name)
        yield sandbox_pb2.TarChunk(data=data)

    async def CollectChanges(
        self, request: Any, context: Any
    ) -> AsyncIterator[sandbox_pb2.TarChunk]:
        box = await self._box(request, context)
        if request.kill_processes:
            _kill_all(box)
        data = _tar(box.root / request.path.strip("/"), ".")
        if request.release:
            await self.Release(sandbox_pb2.ReleaseRequest(lease_id=request.lease_id), context)
        yield sandbox_pb2.TarChunk(data=b"\xff" * 2048 if self.corrupt_archives else data)

    async def release_all(self) -> None:
        """What the expiry of the leases does."""
        for lease_id in list(self.boxes):
            await self.Release(sandbox_pb2.ReleaseRequest(lease_id=lease_id), None)

    async def KillProcesses(self, request: Any, context: Any) -> sandbox_pb2.KillProcessesReply:
        box = await self._box(request, context)
        return sandbox_pb2.KillProcessesReply(num_killed=_kill_all(box))


async def _died(context: grpc.aio.ServicerContext) -> None:
    """As the real broker says it: by the error's name."""
    name = (("swe-rl-error", "SandboxDiedError"),)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the sandbox died", trailing_metadata=name)


def _tar(path: Path, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(path, arcname=name)
    return buffer.getvalue()


def _kill_all(box: Box) -> int:
    """Kills whatever carries the box's mark in its environment."""
    mark, num_killed = f"FAKE_BOX={box.lease_id}".encode(), 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
                    num_killed += 1
            except OSError:
                continue
    return num_killed


Answer = Callable[[list[dict[str, str]]], Awaitable[web.Response] | web.Response]


def say(content: str, finish_reason: str = "stop", decode_ms: int | None = None) -> web.Response:
    """A chat completion."""
    headers = {} if decode_ms is None else {"x-swe-rl-decode-ms": str(decode_ms)}
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return web.json_response({"choices": [choice]}, headers=headers)


def refuse(status: int, code: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.json_response({"error": {"code": code, "message": code}}, status=status)


def script(*answers: str) -> Answer:
    """Says the next of `answers` by the number of assistant messages so far; then the last."""

    def answer(messages: list[dict[str, str]]) -> web.Response:
        num_said = sum(message["role"] == "assistant" for message in messages)
        return say(answers[min(num_said, len(answers) - 1)])

    return answer


class FakeGateway:
    """Answers sessions by their key: `sessions[key] = answer(messages)`."""

    def __init__(self) -> None:
        self.sessions: dict[str, Answer] = {}
        self.requests: list[list[dict[str, str]]] = []
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = request.headers["Authorization"].removeprefix("Bearer ")
        self.requests.append(body["messages"])
        if key not in self.sessions:
            return refuse(404, "unknown_session")
        answer = self.sessions[key](body["messages"])
        return answer if isinstance(answer, web.Response) else await answer


@dataclass
class FakeManager(rollout_pb2_grpc.RolloutManagerServicer):
    """Hands out `queue`, keeps what is finished."""

    queue: list[rollout_pb2.LeasedAttempt] = field(default_factory=list)
    finished: dict[str, rollout_pb2.FinishAttemptRequest] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    num_renewals: int = 0
    lease_s: float = 30.0
    outage: grpc.StatusCode | None = None
    incarnations: set[str] = field(default_factory=set)
    fenced_names: set[str] = field(default_factory=set)

    def _expires(self, target: Any) -> None:
        target.expires_at.FromNanoseconds(int((time.time() + self.lease_s) * 1e9))

    async def _check(self, context: Any) -> None:
        if self.outage is not None:
            await context.abort(self.outage, "outage")

    async def LeaseAttempts(self, request: Any, context: Any) -> rollout_pb2.LeaseAttemptsReply:
        await self._check(context)
        self.incarnations.add(request.incarnation)
        if request.worker in self.fenced_names:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another process")
        # Polled, because tests change plain lists.
        while not self.queue and context.time_remaining() > 0.1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        taken = [self.queue.pop(0) for _ in range(min(len(self.queue), request.max_attempts))]
        for leased in taken:
            self._expires(leased)
        return rollout_pb2.LeaseAttemptsReply(attempts=taken)

    async def RenewAttempts(self, request: Any, context: Any) -> rollout_pb2.RenewAttemptsReply:
        await self._check(context)
        self.num_renewals += 1
        reply = rollout_pb2.RenewAttemptsReply(
            held=[key.attempt_id not in self.lost for key in request.attempts]
        )
        self._expires(reply)
        return reply

    async def FinishAttempt(self, request: Any, context: Any) -> rollout_pb2.FinishAttemptReply:
        await self._check(context)
        if request.attempt_id in self.lost:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "fenced")
        assert request.attempt_id not in self.finished, "finished twice"
        self.finished[request.attempt_id] = request
        return rollout_pb2.FinishAttemptReply()

    async def until_finished(self, count: int, timeout_s: float = 30.0) -> None:
        """Waits until `count` attempts are finished."""
        async with asyncio.timeout(timeout_s):
            while len(self.finished) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def serve(*add: Callable[[grpc.aio.Server], None]) -> tuple[grpc.aio.Server, str]:
    """Serves on a free loopback port; returns the server and its address."""
    server = grpc.aio.server()
    for register in add:
        register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


TASK_TOML = """schema_version = "1.4"
[task]
name = "swe-rl/{name}"
[metadata]
profile = "{profile}"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = {verifier_s}
[environment]
docker_image = "toy"
workdir = "/app"
"""
CHECK = (
    "import sys\nsys.path.insert(0, '/app')\nimport calc\nprint(calc.add(2, 3), calc.add(7, 1))\n"
)


def write_task(
    parent: Path,
    name: str = "fixadd",
    *,
    profile: str = "toy",
    verifier_s: float = 20.0,
    test_sh: str = "#!/bin/sh\nexec python3 -S -B -E /tests/check.py\n",
    grading: str | None = '{"kind": "stdout", "expect": "5 8", "restore": ["t.py"]}',
    solve_sh: str | None = "#!/bin/sh\nsed -i s/-/+/ calc.py\n",
) -> Path:
    """A Harbor task: calc.add subtracts."""
    folder = parent / name
    files = {
        "task.toml": TASK_TOML.format(name=name, profile=profile, verifier_s=verifier_s),
        "instruction.md": "Fix calc.add.",
        "environment/calc.py": "def add(a, b):\n    return a - b\n",
        "environment/t.py": "import calc\n",
        "environment/pkg/mod.py": "X = 1\n",
        "tests/check.py": CHECK,
        "tests/test.sh": test_sh,
    }
    if grading is not None:
        files["tests/grading.json"] = grading
    if solve_sh is not None:
        files["solution/solve.sh"] = solve_sh
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        if path.endswith(".sh"):
            (folder / path).chmod(0o755)
    return folder
