"""A process that takes weights as an engine does: the real loader behind one HTTP call, and
stand-ins for SGLang's own calls beside it.

Owner: tests and the bench here. The model is plain torch and loads by name; what SGLang does
with the tensors is not shown (sglang_loader_test.py and rollout/engines/engine_update_test.py do that).
It listens on a port of its choice and prints it; GET /weights?rank=0 gives a digest of each parameter,
GET /progress the loaders that run and the buckets that came.
With --tensor-parallel each rank is a thread with a model of its own, which holds everything.
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
from weightsync.descriptor import TENSOR_NAME, Descriptor, unpack_plan
from weightsync.fake_stock_calls import StockCalls
from weightsync.transports import open_receiver

FAULTS = ("drop", "truncate", "swap", "overwrite")
"""What a model can do wrong without a word: leave the last tensor as it is; load half of it; give it
and one of its shape each the other's values; overwrite the first with zeros when it loads the last.
"""


class PlainModel(torch.nn.Module):
    """Parameters by name, each loaded as it is, but for a fault."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        signal_in_update: int = 0,
        bucket_s: float = 0.0,
        fault: str = "",
    ) -> None:
        """`signal_in_update` is what the process sends itself when its second bucket is loaded;
        `bucket_s` is how long each takes at least; `fault` is one of FAULTS.
        """
        super().__init__()
        self._signal_in_update = signal_in_update
        self._bucket_s = bucket_s
        self._fault = fault
        self.num_loads = 0
        self.by_name = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            for name, shape in shapes.items()
        }
        for name, parameter in self.by_name.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As SGLang's models: unknown names are skipped without a word."""
        self.num_loads += 1
        if self._signal_in_update and self.num_loads == 2:
            os.kill(os.getpid(), self._signal_in_update)
        time.sleep(self._bucket_s)
        last = list(self.by_name)[-1]
        for name, tensor in weights:
            if name not in self.by_name:
                continue
            parameter = self.by_name[name]
            if name != last or not self._fault:
                parameter.copy_(tensor)
            elif self._fault == "truncate":
                half = len(tensor) // 2
                parameter[:half].copy_(tensor[:half])
            elif self._fault == "swap":
                twin = next(p for p in self.by_name.values() if p.shape == parameter.shape)
                parameter.copy_(twin)
                twin.copy_(tensor)
            elif self._fault == "overwrite":
                parameter.copy_(tensor)
                next(iter(self.by_name.values())).zero_()


def load_unchecked(_model: PlainModel, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A loader that takes every bucket and says that all is well."""
    descriptor = Descriptor.decode(bytes(dict(named)[TENSOR_NAME].numpy()))
    receiver = open_receiver(descriptor.endpoint, descriptor.epoch, descriptor.receiver, 30.0)
    plan = unpack_plan(descriptor.plan, descriptor.plan_digest)
    for index in range(len(plan.buckets)):
        receiver.next(plan.label(index), 30.0)
        receiver.release()
    receiver.verified()


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
    parser.add_argument("--fault", choices=(*FAULTS, "skip_check"), help="of the last rank's model")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = make_weights(arguments.num_tensors, arguments.num_elements, 0)
    ranks = range(arguments.tensor_parallel)
    models = [
        PlainModel(
            {n: tuple(t.shape) for n, t in weights.items()},
            torch.float32,
            signal_in_update=getattr(signal, arguments.signal_in_update or "SIG_DFL"),
            bucket_s=arguments.bucket_s,
            fault=(arguments.fault or "") if rank == ranks[-1] else "",
        )
        for rank in ranks
    ]

    load = load_unchecked if arguments.fault == "skip_check" else sglang_loader.load

    num_updates = {"running": 0}

    async def update(request: web.Request) -> web.Response:
        payloads = (await request.json())["serialized_named_tensors"]
        # Our own test's bytes, as SGLang's server reads them.
        num_updates["running"] += 1
        try:
            await asyncio.gather(
                *(
                    asyncio.to_thread(load, model, pickle.loads(base64.b64decode(payload)))
                    for model, payload in zip(models, payloads, strict=True)
                )
            )
        finally:
            num_updates["running"] -= 1
        return web.Response(text="ok")

    async def show(request: web.Request) -> web.Response:
        model = models[int(request.query.get("rank", "0"))]
        return web.json_response({name: digest(p) for name, p in model.by_name.items()})

    async def progress(_request: web.Request) -> web.Response:
        return web.json_response({**num_updates, "buckets": models[0].num_loads})

    async def serve() -> None:
        app = web.Application(client_max_size=2**30)
        app.add_routes(
            [
                web.post("/update_weights_from_tensor", update),
                web.get("/weights", show),
                web.get("/progress", progress),
            ]
        )
        app.add_routes(StockCalls(models[0]).routes())
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
