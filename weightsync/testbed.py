"""Engines in processes and a manager that is a list of them, for this package's tests."""

from __future__ import annotations

import subprocess
import sys
from functools import cached_property
from typing import Any

import aiohttp
import torch

from proto import rollout_pb2 as pb
from weightsync.fake_engine import digest


class Engine:
    """A fake engine as a child process."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-P", "-m", "weightsync.fake_engine", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @cached_property
    def url(self) -> str:
        """Waits for the engine's start; several start at once until they are asked."""
        assert self.process.stdout is not None
        return f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    async def weights(self, rank: int = 0) -> dict[str, str]:
        """A digest of each parameter."""
        return await self._get(f"/weights?rank={rank}")

    async def progress(self) -> dict[str, int]:
        """Loaders that run, and buckets that came."""
        return await self._get("/progress")

    async def _get(self, path: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return dict(await answer.json())

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """A call that must succeed."""
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url + path, json=body) as answer:
                assert answer.status == 200, await answer.text()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Manager:
    """The two window calls, over a list of engines."""

    def __init__(self, urls: list[str], tensor_parallel: int = 1) -> None:
        self.urls = urls
        self.tensor_parallel = tensor_parallel
        self.epoch = 0
        self.closed: list[pb.CloseUpdateWindowRequest] = []
        self.versions: dict[str, int] = {}

    async def open_update_window(
        self, request: pb.OpenUpdateWindowRequest
    ) -> pb.OpenUpdateWindowReply:
        """Every engine, with what it was last said to serve."""
        assert len(request.plan_digest) == 64
        self.epoch += 1
        reply = pb.OpenUpdateWindowReply(epoch=self.epoch)
        for index, url in enumerate(self.urls):
            name = f"engine{index}"
            reply.targets.add(
                engine=name,
                url=url,
                weight_version=self.versions.get(url, 0),
                tensor_parallel=self.tensor_parallel,
            )
        return reply

    async def close_update_window(
        self, request: pb.CloseUpdateWindowRequest
    ) -> pb.CloseUpdateWindowReply:
        """Believes the sender."""
        self.closed.append(request)
        serving = [r.engine for r in request.results if r.complete]
        for url, result in zip(self.urls, request.results, strict=True):
            if result.complete:
                self.versions[url] = request.weight_version
        return pb.CloseUpdateWindowReply(engines_serving=serving)

    def flags(self) -> list[tuple[bool, bool]]:
        """(complete, touched) of each engine in the last window."""
        return [(r.complete, r.touched) for r in self.closed[-1].results]


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """What an engine with these weights tells."""
    return {name: digest(tensor) for name, tensor in weights.items()}
