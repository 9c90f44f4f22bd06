"""Validation against a real in-process broker whose sandboxes are folders."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from proto import sandbox_pb2 as pb
from proto import sandbox_pb2_grpc as pb_grpc
from rollout.tasks.grading import Grade
from rollout.tasks.harbor_task import INDEX_NAME, IndexEntry, TaskFolder, write_folder, write_index
from rollout.tasks.quarantine import read_quarantine
from rollout.tasks.trial_run import InfrastructureError
from rollout.tasks.validate import judge, main

TREES = ("/app", "/tests", "/solution", "/logs")


class FolderBroker(pb_grpc.SandboxBrokerServicer):
    """Each lease is a folder; the roots that scripts name are rewritten to lie in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_leases = 0
        self.released: list[str] = []
        self.fail_first = 0

    def _inside(self, lease: str, text: bytes) -> bytes:
        for tree in TREES:
            text = text.replace(tree.encode(), f"{self.root}/{lease}{tree}".encode())
        return text

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireReply:
        if self.fail_first:
            self.fail_first -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the backend died")
        self.num_leases += 1
        lease = f"s{self.num_leases}"
        (self.root / lease / "app").mkdir(parents=True)
        return pb.AcquireReply(lease=pb.Lease(lease_id=lease, epoch=1))

    async def Upload(self, requests: AsyncIterator[pb.UploadRequest], _: Any) -> pb.UploadReply:
        parts = [request async for request in requests]
        lease, target = parts[0].lease_id, parts[0].target_dir
        folder = self.root / lease / target.lstrip("/")
        with tarfile.open(fileobj=io.BytesIO(b"".join(p.tar_chunk for p in parts))) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._inside(lease, content.read()))
                path.chmod(member.mode)
        return pb.UploadReply()

    async def Exec(self, request: pb.ExecRequest, _: Any) -> pb.ExecReply:
        command = self._inside(request.lease_id, request.command.encode())
        process = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            command,
            cwd=self.root / request.lease_id / "app",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return pb.ExecReply(stdout=out, stderr=err, exit_code=process.returncode)

    async def Download(self, request: pb.DownloadRequest, _: Any) -> AsyncIterator[pb.TarChunk]:
        path = self.root / request.lease_id / request.path.lstrip("/")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(path, path.name)
        yield pb.TarChunk(data=buffer.getvalue()[:100])
        yield pb.TarChunk(data=buffer.getvalue()[100:])

    async def Release(self, request: pb.ReleaseRequest, _: Any) -> pb.ReleaseReply:
        self.released.append(request.lease_id)
        return pb.ReleaseReply(existed=True)


@contextmanager
def _serving(broker: FolderBroker) -> Iterator[str]:
    """Serves `broker` from a thread with a loop of its own; yields the address."""
    loop = asyncio.new_event_loop()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        pb_grpc.add_SandboxBrokerServicer_to_server(broker, server)
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        return server, port

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop.run_forever)
        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            running.result(30)
            loop.close()


def _task(folder: Path, task_id: str, solve: str, kind: str = "stdout") -> IndexEntry:
    log = "/logs/verifier/pytest.txt"
    grading: dict[str, object] = {"kind": "stdout", "expect": "right"}
    test = "#!/bin/sh\ncat /app/answer\n"
    if kind == "pytest":
        grading = {"kind": "pytest", "fail_to_pass": ["right"], "pass_to_pass": []}
        test = (
            f"#!/bin/sh\necho PASSED $(cat /app/answer) > {log}\n"
            f'echo "tests exited with status $?" >> {log}\n'
        )
    task = TaskFolder(
        task_id=task_id,
        instruction="",
        image="toy",
        profile="toy",
        environment={"answer": b"wrong\n"},
        grading=grading,
        test_sh=test,
        solve_sh=f"#!/bin/sh\n{solve}\n",
        tests={},
        solution={},
        metadata={},
        agent_timeout_s=5,
        verifier_timeout_s=20,
        memory_mb=64,
    )
    return IndexEntry(task_id, write_folder(folder, task), "test")


def _validate(
    tmp_path: Path, entries: list[IndexEntry], broker: FolderBroker
) -> tuple[int, dict[str, Any]]:
    write_index(tmp_path / INDEX_NAME, entries)
    report = tmp_path / "report.json"
    with _serving(broker) as address:
        args = ["--index", str(tmp_path / INDEX_NAME), "--broker", address, "--json", str(report)]
        code = main(args)
    return code, json.loads(report.read_text())


@pytest.fixture
def broker(tmp_path: Path) -> FolderBroker:
    return FolderBroker(tmp_path / "boxes")


def test_valid_tasks(tmp_path: Path, broker: FolderBroker) -> None:
    broker.fail_first = 2  # a broken backend says nothing about a task
    right = "echo right > /app/answer"
    entries = [_task(tmp_path, "a", right), _task(tmp_path, "b", right, kind="pytest")]
    code, report = _validate(tmp_path, entries, broker)
    assert code == 0, report
    assert [row["rewards"] for row in report["tasks"]] == [
        {"gold": [1.0] * 3, "empty": [0.0] * 3}
    ] * 2
    assert broker.num_leases == len(broker.released) == 12
    assert not list(broker.root.rglob("grading.json"))


def test_quarantine(
    tmp_path: Path, broker: FolderBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        _task(tmp_path, "good", "echo right > /app/answer"),
        _task(tmp_path, "no-fix", "true"),
        _task(tmp_path, "breaks", "exit 3"),
    ]
    (entries[0].path / "tests/grading.json").chmod(0o644)
    lost = _task(tmp_path, "malformed", "true")
    (lost.path / "tests/grading.json").write_text("{}")
    code, report = _validate(tmp_path, [*entries, lost], broker)
    assert (code, report["num_valid"], report["num_quarantined"]) == (1, 1, 3)
    reasons = read_quarantine(tmp_path / "report.json")
    assert "gold patch, run 1: reward 0.0, wanted 1.0" in reasons["no-fix"]
    assert "status 3" in reasons["breaks"]
    assert "malformed" in reasons["malformed"]
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: 3 tasks are quarantined")


def test_task_that_passes_unfixed_is_quarantined(tmp_path: Path, broker: FolderBroker) -> None:
    entry = _task(tmp_path, "free", "true")
    (entry.path / "environment/answer").write_text("right")
    code, report = _validate(tmp_path, [entry], broker)
    assert code == 1
    assert "empty patch, run 1: reward 1.0, wanted 0.0" in report["tasks"][0]["reason"]


def _runs(results: list[Grade | Exception]) -> Callable[[str], Awaitable[Grade]]:
    async def run(_: str) -> Grade:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return run


async def test_one_odd_run_in_three_quarantines() -> None:
    gold, empty = Grade(1.0, ""), Grade(0.0, "")
    flaky = Grade(0.0, "1 tests did not pass")
    verdict = await judge("t", _runs([gold, flaky, gold, empty, empty, empty]), repeats=3)
    assert not verdict.valid
    assert "gold patch, run 2" in verdict.reason


async def test_infrastructure_is_retried_within_a_bound() -> None:
    lost = InfrastructureError("gone")
    verdict = await judge("t", _runs([lost, lost, Grade(1.0, ""), Grade(0.0, "")]), repeats=1)
    assert verdict.valid
    verdict = await judge("t", _runs([lost, lost, lost, Grade(0.0, "")]), repeats=1)
    assert "infrastructure: gone" in verdict.reason


def test_no_broker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_index(tmp_path / INDEX_NAME, [])
    args = ["--index", str(tmp_path / INDEX_NAME), "--broker", "127.0.0.1:9"]
    assert main([*args, "--json", str(tmp_path / "r")]) == 2
    assert "no sandbox broker" in capsys.readouterr().err
