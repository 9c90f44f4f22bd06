"""A real SGLang server under the real pool and windows, with a publisher for each path to it.

Owner: the tests here that update a real engine.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import Qwen3MoeConfig

from bazel.environments import PYTHON
from proto import rollout_pb2 as pb
from rollout.engines.config import EngineConfig
from rollout.engines.engine_pool import EnginePool
from rollout.engines.tiny_moe import CONFIG, VOCAB, reference_logprobs
from rollout.engines.update_window import TransferResult, UpdateWindows
from weightsync.config import DiskConfig, WeightSyncConfig
from weightsync.publisher import PublishResult, WeightPublisher
from weightsync.transports import SEGMENT_PREFIX

BANNED = [0, 1, 3, 4, 5, *range(100, 200)]
PROMPT = [1, 3, 10, 11, 2, 1, 4]
TOLERANCE_NATS = 1e-5


class MemoryStore:
    """Keeps what a window saves."""

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
                engine=target.engine,
                url=target.url,
                weight_version=target.weight_version,
                tensor_parallel=target.tensor_parallel,
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
    """What a test here drives."""

    pool: EnginePool
    windows: UpdateWindows
    store: MemoryStore
    publishers: dict[str, WeightPublisher]
    session: aiohttp.ClientSession
    shared_memory_before: set[Path]

    async def publish(
        self, weights: dict[str, torch.Tensor], version: int, transport: str = "shm"
    ) -> PublishResult:
        """A new version through the transport."""
        return await self.publishers[transport].publish(list(weights.items()), version)

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

    async def checksums(self, rank: int = 0) -> dict[str, str]:
        """The engine's own, by parameter of a tensor-parallel rank."""
        answer = await self.post("/weights_checker", {"action": "checksum"})
        return dict(answer["ranks"][rank]["checksums"])


def differences(
    weights: dict[str, torch.Tensor], answer: dict[str, Any], temperature: float = 1.0
) -> list[float]:
    """|engine - reference| of each sampled token, in nats."""
    sampled = answer["output_ids"]
    rows = reference_logprobs(weights, PROMPT + sampled, temperature, BANNED)[len(PROMPT) - 1 :]
    engine = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return [abs(rows[i, t].item() - engine[i]) for i, t in enumerate(sampled)]


def write_model_folder(folder: Path, model: Qwen3MoeConfig = CONFIG) -> None:
    """config.json and a word tokenizer; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)


@asynccontextmanager
async def open_rig(
    tmp_path: Path,
    transports: tuple[str, ...],
    model: Qwen3MoeConfig = CONFIG,
    bucket_bytes: int = 128 * 1024,
    tensor_parallel: int = 1,
    loader: str = "weightsync.sglang_loader.load",
    **engine: Any,
) -> AsyncIterator[Rig]:
    """One engine, started, and a publisher for each transport.

    `bucket_bytes` is small, so that an update of the tiny model takes many and wraps round the ring;
    `engine` are further settings of EngineConfig.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    write_model_folder(folder, model)
    settings = {
        "context_length": 1024,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "poll_interval_s": 0.2,
        **engine,
    }
    config = EngineConfig(
        python=Path(PYTHON["engine"]),
        model_path=folder,
        tensor_parallel=tensor_parallel,
        weight_loader=loader,
        **settings,
    )
    pool = EnginePool(config, tmp_path, tmp_path / "logs", time.monotonic)
    store = MemoryStore()
    windows = UpdateWindows(pool, store, config, time.monotonic)
    sync: dict[str, Any] = {
        "bucket_bytes": bucket_bytes,
        "loader": loader,
        "disk": DiskConfig(directory=tmp_path / "updates"),
    }
    before = shared_memory()
    await pool.start()
    try:
        async with aiohttp.ClientSession() as session:
            publishers = {
                transport: WeightPublisher(
                    WeightSyncConfig(**sync, transport=transport), WindowAdapter(windows)
                )
                for transport in transports
            }
            yield Rig(pool, windows, store, publishers, session, before)
            for publisher in publishers.values():
                await publisher.close()
    finally:
        await pool.close()
