"""A fake engine that holds weights: the real loader behind the calls of fake_engine.

Owner: manager_killed_test. Each time it is told to go on generating, it appends to the file --served
what it would generate with: {"version", "digest"}. The fault `stall` at /update_weights_from_tensor
stops it inside its second bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import pickle
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from aiohttp import web

from rollout.engines.cpu_launcher import die_with_parent
from rollout.engines.fake_engine import FakeEngine, serve
from weightsync import sglang_loader
from weightsync.fake_engine import PlainModel, make_weights

NUM_TENSORS = 20
NUM_ELEMENTS = 1000
UPDATE = "/update_weights_from_tensor"


def digest(weights: Iterable[torch.Tensor]) -> str:
    """Hex SHA-256 of all the bytes in order."""
    found = hashlib.sha256()
    for tensor in weights:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class WeightsEngine(FakeEngine):
    """A fake engine with a model."""

    def __init__(self, served: Path) -> None:
        super().__init__()
        shapes = {n: tuple(t.shape) for n, t in make_weights(NUM_TENSORS, NUM_ELEMENTS, 0).items()}
        self._model = StallingModel(shapes, torch.float32)
        self._served = served

    async def control(self, request: web.Request) -> web.Response:
        """As the base; what it goes on with is noted."""
        response = await super().control(request)
        if request.path == "/continue_generation" and response.status == 200:
            row = {"version": self.weight_version, "digest": digest(self._model.by_name.values())}
            with self._served.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return response

    async def update(self, request: web.Request) -> web.Response:
        """Takes one update as SGLang's server would."""
        self.calls.append(request.path)
        if not self.in_update:
            return web.Response(status=400, text="must run between begin and end")
        self._model.stalls_at = 2 if self.faults.get(UPDATE) == "stall" else 0
        (payload,) = (await request.json())["serialized_named_tensors"]
        named = pickle.loads(base64.b64decode(payload))
        await asyncio.to_thread(sglang_loader.load, self._model, named)
        return web.Response(text="ok")

    async def weights(self, _request: web.Request) -> web.Response:
        """What it holds now, and how much of an update has come."""
        return web.json_response(
            {
                "digest": digest(self._model.by_name.values()),
                "pid": os.getpid(),
                "num_buckets": self._model.num_loads,
            }
        )


class StallingModel(PlainModel):
    """Stops for good in its `stalls_at`-th bucket of the update; 0: never."""

    stalls_at = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As the base."""
        super().load_weights(weights)
        if self.stalls_at:
            self.stalls_at -= 1
            if not self.stalls_at:
                time.sleep(3600)


def main() -> None:
    """Serves on --port until killed, or until its parent is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served", type=Path, required=True)
    arguments, _sglang_flags = parser.parse_known_args()
    die_with_parent()
    torch.set_num_threads(1)
    engine = WeightsEngine(arguments.served)
    more = [web.post(UPDATE, engine.update), web.get("/weights", engine.weights)]
    serve(engine, arguments.port, more)


if __name__ == "__main__":
    main()
