"""A stand-in for SGLang's server, for tests of the pool and of update windows.

Owner: tests here. It answers the control calls, keeps the window rules that we rely on (begin and
end alternate) and fails on command: POST /fault {"path", "action": error | hang | die}. It
proves how we treat faults; it proves nothing about SGLang, which engine_update_test.py does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable

from aiohttp import web

_CONTROL = (
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/flush_cache",
    "/update_weight_version",
)
_METRICS = """\
# HELP ignored
sglang:num_requests_total{model_name="x"} 3.0
sglang:generation_tokens_total{model_name="x"} 40.0
sglang:full_token_usage{model_name="x"} 0.25
sglang:num_running_reqs{model_name="x"} 2.0
"""


class FakeEngine:
    """State and faults of one server."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: dict[str, str] = {}
        self.is_paused = False
        self.in_update = False
        self.weight_version = "default"
        self.pause_mode = ""
        self.num_freezes = 0

    async def control(self, request: web.Request) -> web.Response:
        """Every control call: recorded, then failed or carried out."""
        path = request.path
        self.calls.append(path)
        match self.faults.get(path):
            case "error":
                return web.Response(status=400, text="told to fail")
            case "hang":
                await asyncio.sleep(3600)
            case "die":
                print(f"fake engine dies in {path}", flush=True)
                os._exit(3)
        if path == "/pause_generation":
            self.is_paused = True
            self.pause_mode = (await request.json())["mode"]
        elif path == "/continue_generation":
            self.is_paused = False
        elif path in ("/begin_weight_update", "/end_weight_update"):
            if self.in_update == (path == "/begin_weight_update"):
                return web.Response(status=400, text="begin and end must alternate")
            self.in_update = not self.in_update
        elif path == "/update_weight_version":
            self.weight_version = (await request.json())["new_version"]
        return web.Response(text="ok")

    async def state(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "calls": self.calls,
                "is_paused": self.is_paused,
                "in_update": self.in_update,
                "weight_version": self.weight_version,
                "pause_mode": self.pause_mode,
                "num_freezes": self.num_freezes,
            }
        )

    async def fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.faults[body["path"]] = body["action"]
        return web.Response(text="ok")

    async def freeze_gc(self, _request: web.Request) -> web.Response:
        """Outside the control calls, whose order the tests compare."""
        self.num_freezes += 1
        return web.Response(text="ok")

    async def health(self, _request: web.Request) -> web.Response:
        return await self._look("/health", "")

    async def metrics(self, _request: web.Request) -> web.Response:
        return await self._look("/metrics", _METRICS)

    async def _look(self, path: str, text: str) -> web.Response:
        if self.faults.get(path) == "hang":
            await asyncio.sleep(3600)
        return web.Response(text=text)


def serve(engine: FakeEngine, port: int, more: Iterable[web.RouteDef] = ()) -> None:
    """Serves on loopback until killed; `more` are calls beside the control calls."""
    app = web.Application(client_max_size=2**30)
    app.add_routes([web.post(path, engine.control) for path in _CONTROL])
    app.add_routes(
        [
            web.get("/health", engine.health),
            web.get("/metrics", engine.metrics),
            web.get("/state", engine.state),
            web.post("/fault", engine.fault),
            web.post("/freeze_gc", engine.freeze_gc),
            *more,
        ]
    )
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def main() -> None:
    """Serves on --port until killed; --die-at-start ends at once instead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--die-at-start", action="store_true")
    arguments, _sglang_flags = parser.parse_known_args()
    if arguments.die_at_start:
        sys.exit("fake engine: told to die at start")
    serve(FakeEngine(), arguments.port)


if __name__ == "__main__":
    main()
