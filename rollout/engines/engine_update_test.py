"""Weight updates on a real SGLang server, through the real pool, windows, publisher and loader."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from bazel.environments import PYTHON
from proto import rollout_pb2 as pb
from rollout.engines.config import EngineConfig
from rollout.engines.engine_pool import EnginePool
from rollout.engines.tiny_moe import (
    CONFIG,
    VOCAB,
    expected_checksums,
    make_weights,
    reference_logprobs,
)
from rollout.engines.update_window import TransferResult, UpdateWindows
from weightsync.config import WeightSyncConfig
from weightsync.errors import PublishError
from weightsync.publisher import PublishResult, WeightPublisher
from weightsync.transports import SEGMENT_PREFIX

BANNED = [0, 1, 3, 4, 5, *range(100, 200)]
PROMPT = [1, 3, 10, 11, 2, 1, 4]
TOLERANCE_NATS = 1e-5


class MemoryStore:
    def __init__(self) -> None:
        self.saved: list[tuple[int, int, str, dict[str, str]]] = []

    def save_window(self, epoch: int, weight_version: int, phase: str, engines: Any) -> None:
        self.saved.append((epoch, weight_version, phase, engines))

    def load_open_window(self) -> None:
        return None

    def next_window_epoch(self) -> int:
        return max((row[0] for row in self.saved), default=0) + 1


class WindowAdapter:
    """The manager's two window calls, without its gRPC server."""

    def __init__(self, windows: UpdateWindows) -> None:
        self._windows = windows
        self.on_open: Any = None
        self.paused_s = 0.0

    async def open_update_window(
        self, request: pb.OpenUpdateWindowRequest
    ) -> pb.OpenUpdateWindowReply:
        opened = await self._windows.open(
            request.weight_version, request.plan_digest, request.num_tensors, request.total_bytes
        )
        reply = pb.OpenUpdateWindowReply(epoch=opened.epoch)
        for target in opened.targets:
            reply.targets.add(
                engine=target.engine, url=target.url, weight_version=target.weight_version
            )
        return reply

    async def close_update_window(
        self, request: pb.CloseUpdateWindowRequest
    ) -> pb.CloseUpdateWindowReply:
        closed = await self._windows.close(
            request.epoch,
            request.weight_version,
            [TransferResult(r.engine, r.complete, r.touched, r.error) for r in request.results],
        )
        reply = pb.CloseUpdateWindowReply(
            engines_serving=closed.engines_serving, engines_restarting=closed.engines_restarting
        )
        reply.paused.FromNanoseconds(int(closed.paused_s * 1e9))
        return reply


def shared_memory() -> set[Path]:
    """What lies in /dev/shm, but for what other tests may have there meanwhile: folders of whole
    runs, semaphores outside engines, segments of other senders.
    """
    others = re.compile(rf"swe_rl-launch-|sem\.mp-|{SEGMENT_PREFIX}(?!{os.getpid()}_)")
    return {path for path in Path("/dev/shm").iterdir() if not others.match(path.name)}


@dataclass
class Rig:
    pool: EnginePool
    windows: UpdateWindows
    store: MemoryStore
    publisher: WeightPublisher
    tcp_publisher: WeightPublisher
    session: aiohttp.ClientSession
    shared_memory_before: set[Path]

    async def publish(self, weights: dict[str, torch.Tensor], version: int) -> PublishResult:
        return await self.publisher.publish(list(weights.items()), version)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = self.pool.engines["engine0"].url + path
        async with self.session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            return dict(await response.json())

    async def generate(
        self, num_tokens: int, temperature: float = 1.0, banned: list[int] = BANNED
    ) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": num_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "logit_bias": {str(token): -1e9 for token in banned},
        }
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        return await self.post("/generate", body)

    async def checksums(self) -> dict[str, str]:
        answer = await self.post("/weights_checker", {"action": "checksum"})
        return dict(answer["ranks"][0]["checksums"])


def differences(
    weights: dict[str, torch.Tensor], answer: dict[str, Any], temperature: float = 1.0
) -> list[float]:
    """|engine - reference| of each sampled token, in nats."""
    sampled = answer["output_ids"]
    rows = reference_logprobs(weights, PROMPT + sampled, temperature, BANNED)[len(PROMPT) - 1 :]
    engine = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return [abs(rows[i, t].item() - engine[i]) for i, t in enumerate(sampled)]


def write_model_folder(folder: Path) -> None:
    """config.json and a word tokenizer; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    CONFIG.save_pretrained(folder)


async def wait_for_state(rig: Rig, state: str, timeout_s: float = 240.0) -> None:
    async with asyncio.timeout(timeout_s):
        while rig.pool.engines["engine0"].state != state:
            assert rig.pool.engines["engine0"].state != "failed", rig.pool.engines["engine0"]
            await asyncio.sleep(0.1)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    model = tmp_path / "model"
    model.mkdir()
    write_model_folder(model)
    config = EngineConfig(
        python=Path(PYTHON["engine"]),
        model_path=model,
        context_length=1024,
        max_total_tokens=4096,
        max_running_requests=8,
        poll_interval_s=0.2,
    )
    pool = EnginePool(config, tmp_path, tmp_path / "logs", time.monotonic)
    store = MemoryStore()
    windows = UpdateWindows(pool, store, config, time.monotonic)
    # Small buckets, so that an update takes many and wraps round the ring.
    sync = WeightSyncConfig(bucket_bytes=128 * 1024)
    before = shared_memory()
    await pool.start()
    try:
        async with aiohttp.ClientSession() as session:
            over_shm, over_tcp = (
                WeightPublisher(
                    sync.model_copy(update={"transport": transport}), WindowAdapter(windows)
                )
                for transport in ("shm", "tcp")
            )
            yield Rig(pool, windows, store, over_shm, over_tcp, session, before)
    finally:
        await pool.close()


async def test_updates_of_a_live_engine(rig: Rig) -> None:
    engine = rig.pool.engines["engine0"]
    first, second = make_weights(1), make_weights(2)

    # The first publication waits for the engine to start, and makes it serve.
    published = await rig.publish(first, 1)
    assert published.engines == ("engine0",)
    assert (engine.state, engine.weight_version) == ("serving", 1)
    # The pad rows of the embedding are SGLang's own, so its digest is not compared.
    expected = expected_checksums(first)
    found = await rig.checksums()
    assert {name: found[name] for name in expected} == expected

    # Log-probs are those of the masked, tempered softmax.
    num_requests = 0
    for temperature in (1.0, 0.7):
        answer = await rig.generate(60, temperature)
        num_requests += 1
        assert not set(answer["output_ids"]) & set(BANNED)
        assert max(differences(first, answer, temperature)) <= TOLERANCE_NATS
        assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 60}]

    # An update while a request runs, over TCP: every token matches the version of its span.
    running = asyncio.create_task(rig.generate(500))
    num_requests += 1
    await asyncio.sleep(0.5)
    await rig.tcp_publisher.publish(second.items(), 2)
    answer = await running
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "2"]
    assert (spans[0]["start"], spans[0]["end"]) == (0, spans[1]["start"])
    assert spans[1]["end"] == 500
    assert 0 < spans[1]["start"] < 500
    under_first, under_second = differences(first, answer), differences(second, answer)
    assert max(under_first[: spans[0]["end"]]) <= TOLERANCE_NATS
    assert max(under_second[spans[1]["start"] :]) <= TOLERANCE_NATS
    assert max(under_first[spans[1]["start"] :]) > 0.1  # the comparison can tell them apart
    expected = expected_checksums(second)
    found = await rig.checksums()
    assert {name: found[name] for name in expected} == expected

    # The engine's own counters are exact: health checks and updates add nothing.
    async with asyncio.timeout(10):
        while engine.num_requests < num_requests:
            await asyncio.sleep(0.1)
    assert (engine.num_requests, engine.num_generated_tokens) == (num_requests, 620)

    # An update that lacks a tensor is refused before it touches anything.
    lacking = dict(itertools.islice(make_weights(3).items(), 1, None))
    with pytest.raises(PublishError, match="names are missing or unknown"):
        await rig.publish(lacking, 3)
    assert (engine.state, engine.weight_version, engine.num_restarts) == ("serving", 2, 0)
    answer = await rig.generate(20)
    assert max(differences(second, answer)) <= TOLERANCE_NATS
    assert answer["meta_info"]["weight_version"] == "2"

    # One that breaks half-way costs the engine its process; a full update restores it.
    broken = make_weights(4)
    name = "model.layers.1.self_attn.q_proj.weight"
    broken[name] = broken[name].reshape(-1, 2)
    with pytest.raises(PublishError, match=name.replace(".", r"\.")):
        await rig.publish(broken, 4)
    assert (engine.state, engine.weight_version) == ("starting", 0)
    assert name in engine.detail
    await rig.publish(make_weights(5), 5)
    assert (engine.state, engine.weight_version, engine.num_restarts) == ("serving", 5, 1)
    answer = await rig.generate(20)
    assert max(differences(make_weights(5), answer)) <= TOLERANCE_NATS
    assert answer["meta_info"]["weight_version"] == "5"
    assert [row[2] for row in rig.store.saved if row[0] == 1] == [
        "pause",
        "begin",
        "buckets",
        "commit",
        "closed",
    ]

    # Nothing is left behind.
    folder = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert folder.read_text().split()
    await rig.pool.close()
    assert not folder.read_text().split()
    assert shared_memory() <= rig.shared_memory_before
