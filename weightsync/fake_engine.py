"""A process that takes weights as an engine does: the real loader behind one HTTP call, and
stand-ins for SGLang's own calls beside it.

Owner: tests and the bench here. The model is plain torch and loads by name; what SGLang does
with the tensors is not shown (rollout/engines/engine_update_test.py does that). It listens on a
port of its choice and prints it; GET /weights gives a digest of each parameter, GET
/progress the loaders that run and the buckets that came.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import os
import pickle
import signal
import time
from collections.abc import Iterable, Mapping

import torch
from aiohttp import web

from weightsync import sglang_loader
from weightsync.fake_stock_calls import StockCalls


class PlainModel(torch.nn.Module):
    """Parameters by name, each loaded as it is."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        signal_in_update: int = 0,
        bucket_s: float = 0.0,
    ) -> None:
        """`signal_in_update` is what the process sends itself when its second bucket is loaded;
        `bucket_s` is how long each takes at least.
        """
        super().__init__()
        self._signal_in_update = signal_in_update
        self._bucket_s = bucket_s
        self.num_loads = 0
        self.by_name = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            for name, shape in shapes.items()
        }
        for index, parameter in enumerate(self.by_name.values()):
            self.register_parameter(f"p{index}", parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As SGLang's models: unknown names are skipped without a word."""
        self.num_loads += 1
        if self._signal_in_update and self.num_loads == 2:
            os.kill(os.getpid(), self._signal_in_update)
        time.sleep(self._bucket_s)
        for name, tensor in weights:
            if name in self.by_name:
                self.by_name[name].copy_(tensor)


def make_weights(num_tensors: int, num_elements: int, seed: int) -> dict[str, torch.Tensor]:
    """float32 tensors of odd sizes, equal for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}.weight": torch.randn(num_elements + i % 7, generator=generator)
        for i in range(num_tensors)
    }


def digest(tensor: torch.Tensor) -> str:
    """Hex SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-tensors", type=int, default=20)
    parser.add_argument("--num-elements", type=int, default=1000)
    parser.add_argument(
        "--signal-in-update",
        default="",
        help="sent to itself at its second bucket: SIGKILL, SIGSTOP",
    )
    parser.add_argument("--bucket-s", type=float, default=0.0, help="least time of a bucket")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = make_weights(arguments.num_tensors, arguments.num_elements, 0)
    model = PlainModel(
        {n: tuple(t.shape) for n, t in weights.items()},
        torch.float32,
        signal_in_update=getattr(signal, arguments.signal_in_update or "SIG_DFL"),
        bucket_s=arguments.bucket_s,
    )

    num_updates = {"running": 0}

    async def update(request: web.Request) -> web.Response:
        (payload,) = (await request.json())["serialized_named_tensors"]
        # Our own test's bytes, as SGLang's server reads them.
        named = pickle.loads(base64.b64decode(payload))
        num_updates["running"] += 1
        try:
            await asyncio.to_thread(sglang_loader.load, model, named)
        finally:
            num_updates["running"] -= 1
        return web.Response(text="ok")

    async def show(_request: web.Request) -> web.Response:
        return web.json_response({name: digest(p) for name, p in model.by_name.items()})

    async def progress(_request: web.Request) -> web.Response:
        return web.json_response({**num_updates, "buckets": model.num_loads})

    async def serve() -> None:
        app = web.Application(client_max_size=2**30)
        app.add_routes(
            [
                web.post("/update_weights_from_tensor", update),
                web.get("/weights", show),
                web.get("/progress", progress),
            ]
        )
        app.add_routes(StockCalls(model).routes())
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
