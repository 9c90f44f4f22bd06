"""What the trainer's tests share: a tiny model, records, and a scripted RolloutManager.

The manager is a real gRPC server that hands out prepared batches; nothing is patched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from proto import rollout_pb2 as rpb
from proto import rollout_pb2_grpc, trajectory_pb2

VOCAB = 40
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.001,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,  # more than a head's share of hidden_size
        "rope_theta": 1000000.0,
    },
    "qwen3_moe": {},
}
"""What sets a tiny model of each family apart from TINY."""


def write_model(folder: Path, seed: int = 0, scale: float = 1.0, **overrides: object) -> Path:
    """A model folder with random weights; `scale` multiplies matrices so that outputs differ."""
    from safetensors.torch import save_file

    from trainer.init_model import random_weights

    config = TINY | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, seed)
    scaled = {k: v * scale if v.dim() > 1 else v for k, v in weights.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def record(
    ids: Sequence[int] | np.ndarray,
    mask: Sequence[int] | np.ndarray,
    *,
    attempt_id: str = "a",
    group_id: str = "g",
    logprobs: Sequence[float] | None = None,
    version: int = 1,
    temperature: float = 1.0,
    banned: Sequence[int] = (),
    reward: float | None = None,
    branch_index: int = 0,
) -> trajectory_pb2.TokenSequence:
    """A TokenSequence; sampled when logprobs are given, else SFT data."""
    sequence = trajectory_pb2.TokenSequence(
        attempt_id=attempt_id,
        group_id=group_id,
        branch_index=branch_index,
        token_ids=np.asarray(ids, "<i4").tobytes(),
        loss_mask=np.asarray(mask, np.uint8).tobytes(),
        reward=reward,
    )
    if logprobs is not None:
        sequence.rollout_logprobs = np.asarray(logprobs, "<f4").tobytes()
        sequence.version_spans.add(weight_version=version, start=0, end=len(ids))
        sequence.sampling.temperature = temperature
        sequence.sampling.banned_token_ids.extend(banned)
        sequence.oldest_weight_version = version
    return sequence


def with_experts(
    sequence: trajectory_pb2.TokenSequence, experts: np.ndarray, num_experts: int = 4
) -> trajectory_pb2.TokenSequence:
    """The record with `experts`: integer[N - 1, L, K]."""
    result = trajectory_pb2.TokenSequence()
    result.CopyFrom(sequence)
    layout = result.routed_experts.layout
    layout.num_layers, layout.top_k = experts.shape[1:]
    layout.num_experts = num_experts
    dtype = np.uint8 if num_experts <= 256 else np.dtype("<u2")
    result.routed_experts.ids = experts.astype(dtype).tobytes()
    return result


def copy_rows(num_rows: int, seed: int = 0) -> Iterable[trajectory_pb2.TokenSequence]:
    """A toy that SFT learns in a few steps: the second half repeats one fixed id."""
    rng = np.random.default_rng(seed)
    for i in range(num_rows):
        prompt = rng.integers(6, VOCAB, int(rng.integers(4, 12)))
        answer = np.full(4, 7)
        mask = [0] * len(prompt) + [1] * len(answer)
        yield record([*prompt, *answer], mask, attempt_id=f"row{i}")


@dataclasses.dataclass
class Published:
    """What a FakePublisher reports."""

    weight_version: int
    num_bytes: int = 4
    duration_s: float = 0.0
    engines: tuple[str, ...] = ("engine-0",)


class LostError(Exception):
    """No engine took the weights."""


class FakePublisher:
    """Remembers the versions and one tensor of each publication."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.norms: list[Any] = []
        self.num_failures = 0

    async def publish(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> Published:
        tensors = dict(named_tensors)
        self.versions.append(version)
        if self.num_failures:
            self.num_failures -= 1
            raise LostError(f"weight_version {version} reached no engine")
        self.norms.append(tensors["model.layers.0.mlp.gate.weight"].clone())
        return Published(version)


class ScriptedManager(rollout_pb2_grpc.RolloutManagerServicer):
    """Hands out prepared replies of NextBatch in order and stores what it is told."""

    def __init__(self) -> None:
        self.replies: list[rpb.NextBatchReply] = []
        self.sequences: dict[str, list[trajectory_pb2.TokenSequence]] = {}
        self.asked: list[rpb.NextBatchRequest] = []
        self.acked: list[rpb.AckBatchRequest] = []
        self.rewound: list[rpb.RewindRequest] = []
        self.checkpoints: list[rpb.ReportCheckpointRequest] = []
        self.max_weight_version = 0
        self.num_refusals = 0
        self.refuses_acks = False
        self.corrupt: set[str] = set()  # attempts whose record cannot be read back
        self.evaluations: list[rpb.StartEvaluationRequest] = []
        self.scores: list[float] = []  # of evaluations in order; none left: it never ends
        self.served_version: int | None = None  # by evaluations; None: the one in their name

    def add_batch(self, groups: dict[str, list[trajectory_pb2.TokenSequence]]) -> None:
        """Prepares a batch; each sequence is a trajectory of one branch."""
        reply = rpb.NextBatchReply(batch_id=f"batch{len(self.replies)}", max_staleness=4)
        for group_id, members in groups.items():
            group = reply.groups.add(group_id=group_id, task_id=group_id)
            for s in members:
                self.sequences[s.attempt_id] = [s]
                group.members.add(
                    attempt_id=s.attempt_id,
                    group_id=group_id,
                    reward=s.reward if s.HasField("reward") else None,
                    oldest_weight_version=s.oldest_weight_version,
                )
        self.replies.append(reply)

    async def NextBatch(self, request: Any, context: Any) -> rpb.NextBatchReply:
        if self.num_refusals:
            self.num_refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        self.asked.append(request)
        while not self.replies:  # noqa: ASYNC110 - filled from another thread
            await asyncio.sleep(0.01)
        return self.replies.pop(0)

    async def AckBatch(self, request: Any, context: Any) -> rpb.AckBatchReply:
        if self.refuses_acks:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        self.acked.append(request)
        return rpb.AckBatchReply()

    async def Rewind(self, request: Any, context: Any) -> rpb.RewindReply:
        self.rewound.append(request)
        return rpb.RewindReply(lineage=1, max_weight_version=self.max_weight_version)

    async def ReportCheckpoint(self, request: Any, context: Any) -> rpb.ReportCheckpointReply:
        self.checkpoints.append(request)
        return rpb.ReportCheckpointReply()

    async def StartEvaluation(self, request: Any, context: Any) -> rpb.StartEvaluationReply:
        self.evaluations.append(request)
        return rpb.StartEvaluationReply()

    async def GetEvaluation(self, request: Any, context: Any) -> rpb.GetEvaluationReply:
        if not self.scores:
            return rpb.GetEvaluationReply(num_attempts=1, republish_requested=True)
        version = self.served_version or int(request.name.rpartition("-v")[2])
        reply = rpb.GetEvaluationReply(finished=True, weight_version=version)
        reply.tasks.add(task_id="t", rewards=[self.scores.pop(0)])
        return reply

    async def FetchSequences(
        self, request: Any, context: Any
    ) -> AsyncIterator[rpb.FetchSequencesReply]:
        for attempt_id in request.attempt_ids:
            if attempt_id in self.corrupt:
                await context.abort(grpc.StatusCode.DATA_LOSS, f"{attempt_id}: wrong checksum")
            for sequence in self.sequences[attempt_id]:
                yield rpb.FetchSequencesReply(part=sequence, last_part=True)


class ManagerThread:
    """A ScriptedManager behind a real port, and a link to it, in a loop of their own."""

    def __init__(self, retry_s: float = 5.0, manager: ScriptedManager | None = None) -> None:
        from rollout.client import RolloutClient
        from trainer.manager_link import ManagerLink

        self.manager = manager or ScriptedManager()
        self.publisher = FakePublisher()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

        async def start() -> tuple[grpc.aio.Server, str, grpc.aio.Channel]:
            server = grpc.aio.server()
            rollout_pb2_grpc.add_RolloutManagerServicer_to_server(  # type: ignore[no-untyped-call]
                self.manager, server
            )
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            return server, address, grpc.aio.insecure_channel(address)

        self._server, self.address, self._channel = self.call(start())
        self.client = RolloutClient(self._channel)
        self.link = ManagerLink(self.loop, self.client, self.publisher, retry_s, (LostError,))

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        self.call(self._channel.close())
        self.call(self._server.stop(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
