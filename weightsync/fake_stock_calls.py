"""SGLang's own update calls on a plain model, for tests of the paths that use them.

Owner: fake_engine. The process group is torch's real one, made as SGLang 0.5.23 makes it, and files
are read by the real safetensors; sessions, fused parameters and the KV cache are not shown
(rollout/engines/stock_update_test.py has the real server). Calls run one at a time in a thread, as in
SGLang's scheduler: one that waits keeps the others waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import (
    Backend,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
    rendezvous,
)

Order = dict[str, Any]


class StockCalls:
    """The calls of one engine."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._groups: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )

    def routes(self) -> list[web.RouteDef]:
        """What to serve."""
        calls = {
            "/init_weights_update_group": self._init,
            "/destroy_weights_update_group": self._destroy,
            "/update_weights_from_distributed": self._distributed,
            "/update_weights_from_disk": self._disk,
        }
        return [web.post(path, self._handler(call)) for path, call in calls.items()]

    def _handler(self, call: Callable[[Order], None]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            order = await request.json()
            async with self._lock:
                try:
                    await asyncio.to_thread(call, order)
                except Exception as error:  # noqa: BLE001 (as SGLang: every failure is a 400)
                    return web.Response(status=400, text=repr(error))
            return web.json_response({"success": True})

        return handle

    def _init(self, order: Order) -> None:
        name, rank = order["group_name"], order["rank_offset"]
        address = f"tcp://{order['master_address']}:{order['master_port']}"
        store, _, _ = next(
            rendezvous(address, rank, order["world_size"], timeout=default_pg_timeout)
        )
        store.set_timeout(default_pg_timeout)
        group, _ = _new_process_group_helper(
            order["world_size"],
            rank,
            [],
            Backend(order["backend"]),
            PrefixStore(name, store),
            group_name=name,
            timeout=default_pg_timeout,
        )
        _world.pg_group_ranks[group] = {i: i for i in range(order["world_size"])}
        self._groups[name] = group

    def _destroy(self, order: Order) -> None:
        torch.distributed.destroy_process_group(self._groups.pop(order["group_name"]))

    def _distributed(self, order: Order) -> None:
        group = self._groups[order["group_name"]]
        dtypes = [getattr(torch, dtype) for dtype in order["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(order["shapes"], dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        torch.distributed.broadcast(flat, src=0, group=group)
        parts = flat.split(sizes)
        self._model.load_weights(
            (name, part.view(dtype).view(shape))
            for name, part, dtype, shape in zip(
                order["names"], parts, dtypes, order["shapes"], strict=True
            )
        )

    def _disk(self, order: Order) -> None:
        from safetensors.torch import load_file

        paths = sorted(Path(order["model_path"]).glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"no safetensors in {order['model_path']}")
        for path in paths:
            self._model.load_weights(load_file(path).items())
