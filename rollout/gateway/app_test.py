"""The gateway as a process: address file, drain, and one clear line at a bad start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from aiohttp import web

from proto.serving import ServingError
from rollout.gateway.app import _tls
from rollout.gateway.config import GatewayConfig
from rollout.gateway.fakes import generation
from rollout.gateway.tiny_tokenizer import TINY, write_model
from rollout.gateway.world import World, user


def write_config(folder: Path, **fields: object) -> Path:
    path = folder / "gateway.json"
    values = {"manager_address": "127.0.0.1:1", "model_dir": str(folder / "model"), **fields}
    path.write_text(json.dumps(values))
    return path


async def start(config: Path, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "rollout.gateway.app", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        *command, *arguments, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def refused(config: Path, *arguments: str) -> str:
    """The one line that a bad start prints."""
    process = await start(config, *arguments)
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2, stderr.decode()
    (line,) = stderr.decode().splitlines()
    assert line.startswith("error: rollout.gateway")
    return line


async def test_it_serves_a_turn_and_drains_the_one_under_way(tmp_path: Path, world: World) -> None:
    write_model(tmp_path / "model", TINY)
    config = write_config(tmp_path, manager_address=world.manager.address)
    address_file = tmp_path / "address"
    process = await start(config, "--listen", "127.0.0.1:0", "--address-file", str(address_file))
    try:
        for _ in range(600):
            if address_file.exists():
                break
            await asyncio.sleep(0.05)
        url = f"http://{address_file.read_text().strip()}"
        key = world.manager.add_attempt()
        messages = [user("a")]
        await world.say(key, messages, url)

        gate = asyncio.Event()
        began = asyncio.Event()

        async def slow(_: object, __: object) -> web.StreamResponse:
            began.set()
            await gate.wait()
            return web.json_response(generation([70, 2]))

        world.engines[0].plans = [slow]
        messages.append(user("b"))
        call = asyncio.create_task(world.say(key, messages, url))
        await began.wait()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        gate.set()
        assert await call == world.chat.decode([70])
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, stderr.decode()
        assert world.manager.open_tickets == set()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_bad_starts_are_one_line(tmp_path: Path) -> None:
    assert "wrong_key" in await refused(write_config(tmp_path, wrong_key=1))
    config = write_config(tmp_path)
    assert "no readable tokenizer" in await refused(config)
    write_model(tmp_path / "model", TINY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = await refused(config, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert "choose another port" in line
    assert "off loopback a gateway needs TLS" in await refused(config, "--listen", "0.0.0.0:0")


async def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv=['x','--help']\n"
        "import rollout.gateway.app as app\n"
        "try: app.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", code, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:80"])
def test_off_loopback_needs_tls(tmp_path: Path, listen: str) -> None:
    config = GatewayConfig(manager_address="127.0.0.1:1", model_dir=tmp_path)
    with pytest.raises(ServingError, match="needs TLS"):
        _tls(config, listen)
    assert _tls(config, "127.0.0.1:0") is None


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    common = {"manager_address": "127.0.0.1:1", "model_dir": tmp_path}
    with pytest.raises(ValueError, match="admission_wait_s"):
        GatewayConfig(**common, admission_wait_s=10, turn_deadline_s=5)
    with pytest.raises(ValueError, match="set together"):
        GatewayConfig(**common, tls_certificate=tmp_path)
