"""How far the trainer's log-probs are from a real SGLang engine's, with and without routing replay.

    ./bazelw run //tests:routing_gap_bench -- [--quick] [--json PATH]

A tiny Qwen3-MoE is trained a little, published to an engine of the same dtype, and samples. The
trainer then scores the sampled tokens, routing freely and replaying the engine's experts. After that
it takes RL steps, at the default rate, on further samples of the same version, and scores the first
ones again: effective sample sizes at a staleness of 0, 1, 2 and 4 updates. Metrics are those of
diagnostics.py, by name.
`routing_differs` is the share of (token, layer) pairs where the two chose unlike sets of experts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from trainer.batch import MicroBatch, Sequence
    from trainer.step import Learner

_VOCAB = 300
_STALENESS = (0, 1, 2, 4)
_GROUP_SIZE = 8
_CONCURRENCY = 16
_MODEL = {
    "vocab_size": _VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "architectures": ["Qwen3MoeForCausalLM"],
}
Dtype = Literal["bfloat16", "float32"]


def _teach(learner: Learner, num_steps: int) -> None:
    """Trains on sequences of a few interleaved counters: what follows is uncertain, not random."""
    import numpy as np

    from trainer import batch, testbed
    from trainer.config import OptimConfig

    learner.begin_stage(OptimConfig(lr=2e-3, warmup_steps=5), num_steps, router_aux_loss=0.01)
    rng = np.random.default_rng(0)
    for step in range(1, num_steps + 1):
        rows = []
        for _ in range(16):
            counters = rng.integers(6, _VOCAB, 4)
            strides = rng.integers(1, 6, 4)
            ids = []
            for _ in range(64):
                which = int(rng.integers(4))
                counters[which] = 6 + (counters[which] + strides[which] - 6) % (_VOCAB - 6)
                ids.append(int(counters[which]))
            rows.append(batch.from_proto(testbed.record(ids, [1] * 64), _VOCAB))
        micros = batch.make_micro_batches(rows, 4096, _VOCAB, learner.policy.device.torch_device)
        count = sum(row.num_trained for row in rows)

        def mean(_: int, _micro: MicroBatch, new: torch.Tensor, n: int = count) -> torch.Tensor:
            return -new.sum() / n

        learner.update(micros, mean, step)


async def _sample(url: str, layout: Any, num_groups: int, num_tokens: int, seed: int) -> list[Any]:
    """Groups of TokenSequences from one engine, as the gateway and the manager would make them."""
    import numpy as np

    from proto import trajectory_pb2 as tpb
    from rollout.gateway.engine_client import EngineClient
    from rollout.gateway.routing import Routing

    rng = np.random.default_rng([seed, 1])
    prompts = [rng.integers(6, _VOCAB, 24).tolist() for _ in range(num_groups)]
    free = asyncio.Semaphore(_CONCURRENCY)

    async def one(client: EngineClient, group: int, member: int) -> tpb.TokenSequence:
        prompt = prompts[group]
        async with free:
            got = await client.generate(
                url,
                f"{seed}-{group}-{member}",
                prompt,
                max_new_tokens=num_tokens,
                temperature=1.0,
                stop_token_ids=[],
                banned_token_ids=[],
                extra_key="",
                timeout_s=300.0,
                ignore_stops=True,
                routing=Routing(layout, 0),
            )
        ids = np.asarray(prompt + got.ids, "<i4")
        zeros = np.zeros(len(prompt), "<f4")
        sequence = tpb.TokenSequence(
            attempt_id=f"{group}-{member}",
            group_id=str(group),
            token_ids=ids.tobytes(),
            loss_mask=bytes([0] * len(prompt) + [1] * len(got.ids)),
            rollout_logprobs=np.concatenate([zeros, np.asarray(got.logprobs, "<f4")]).tobytes(),
            sampling=tpb.SamplingParams(temperature=1.0),
            # Something that a policy can get better at.
            reward=float(np.mean(np.asarray(got.ids) % 2 == 0)),
            routed_experts=tpb.RoutedExperts(layout=layout, ids=got.experts),
        )
        sequence.version_spans.add(weight_version=1, start=len(prompt), end=len(ids))
        return sequence

    async with EngineClient(max_connections=0, connect_s=60.0, abort_timeout_s=60.0) as client:
        members = [(g, m) for g in range(num_groups) for m in range(_GROUP_SIZE)]
        return list(await asyncio.gather(*(one(client, g, m) for g, m in members)))


def _pack(sequences: list[Sequence], replay: bool) -> list[MicroBatch]:
    import torch

    from trainer import batch

    chosen = sequences if replay else [dataclasses.replace(s, experts=None) for s in sequences]
    return batch.make_micro_batches(chosen, 4096, _VOCAB, torch.device("cpu"))


def _score(learner: Learner, sequences: list[Sequence], replay: bool) -> dict[str, float]:
    """diagnostics.off_policy_metrics of the sampled tokens under the trainer's weights."""
    import numpy as np
    import torch

    from trainer import diagnostics
    from trainer.config import LossConfig

    micros = _pack(sequences, replay)
    ours = torch.cat(learner.logprobs(micros)).double().numpy()
    tokens = diagnostics.ActiveTokens(
        new=ours,
        old=ours,
        rollout=torch.cat([m.rollout for m in micros]).double().numpy(),
        advantage=np.zeros(len(ours)),
        sequence=torch.cat([m.sequence for m in micros]).numpy(),
        versions=torch.cat([m.versions for m in micros]).numpy(),
    )
    return diagnostics.off_policy_metrics(tokens, LossConfig(), weight_version=1)


def _routing_differs(learner: Learner, sequences: list[Sequence]) -> tuple[float, float]:
    """Shares of (token, layer) pairs, and of tokens, whose experts the trainer chooses otherwise."""
    import torch
    from transformers import Qwen3MoeConfig

    layers = range(Qwen3MoeConfig(**_MODEL).num_hidden_layers)
    pairs: list[torch.Tensor] = []
    for replayed, free in zip(_pack(sequences, True), _pack(sequences, False), strict=True):
        free.rows.chosen_experts = {}
        learner.logprobs([free])
        ours = torch.stack([free.rows.chosen_experts[i] for i in layers], 1)
        assert replayed.rows.experts is not None
        theirs = replayed.rows.experts.long()
        differs = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
        lengths = torch.diff(replayed.rows.cu_seqlens_q)
        read = torch.ones(len(differs), dtype=torch.bool)
        read[lengths.cumsum(0) - 1] = False  # nothing is known of last tokens
        pairs.append(differs[read])
    all_pairs = torch.cat(pairs)
    return float(all_pairs.double().mean()), float(all_pairs.any(-1).double().mean())


def _rl_step(learner: Learner, sequences: list[Sequence], step: int, replay: bool) -> None:
    """One step of the default member of the GRPO family."""
    import torch

    from trainer import loss
    from trainer.advantage import group_advantages
    from trainer.config import LossConfig

    advantages: list[float] = []
    for first in range(0, len(sequences), _GROUP_SIZE):
        rewards = [float(s.reward or 0.0) for s in sequences[first : first + _GROUP_SIZE]]
        found = group_advantages(rewards, "grpo", 1.0)
        advantages += [0.0] * len(rewards) if found is None else [float(a) for a in found]
    advantage = torch.tensor(advantages, dtype=torch.float32)
    micros = _pack(sequences, replay)
    count = sum(m.targets.numel() for m in micros)

    def loss_of(_: int, micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
        tokens = loss.TokenBatch(
            new=new,
            old=new.detach(),
            rollout=micro.rollout,
            advantage=advantage[micro.sequence],
            mask=torch.ones_like(new, dtype=torch.bool),
            weight=torch.full_like(new, 1 / count),
            sequence=micro.sequence,
        )
        return loss.policy_loss(tokens, LossConfig()).loss

    learner.update(micros, loss_of, step)


async def _measure(dtype: Dtype, quick: bool, folder: Path) -> list[dict[str, Any]]:
    from transformers import Qwen3MoeConfig

    from rollout.engines.engine_rig import open_rig
    from rollout.experts import read_layout
    from trainer import batch, device, hf_export, init_model
    from trainer.config import GridConfig, RlOptimConfig
    from trainer.model import Policy
    from trainer.step import Learner

    num_groups, num_tokens = (4, 32) if quick else (8, 96)
    config = Qwen3MoeConfig(**_MODEL)
    model = folder / "start"
    config.save_pretrained(model)
    assert init_model.main(["--model-dir", str(model)]) == 0
    devices = device.enter(1, 60.0)

    def learner_of(start: Path) -> Learner:
        policy = Policy(start, GridConfig(), devices, seed=0, dtype=dtype)
        policy.load_hf()
        return Learner(policy, 8192)

    teacher, taught = learner_of(model), folder / "taught"
    _teach(teacher, 20 if quick else 100)
    hf_export.write(teacher.policy.export_named_tensors(), model, taught)
    learners = {replay: learner_of(taught) for replay in (True, False)}
    for learner in learners.values():
        learner.begin_stage(RlOptimConfig(warmup_steps=0), 100, router_aux_loss=0.0)
    async with open_rig(
        folder,
        ("shm",),
        config,
        bucket_bytes=2**20,
        dtype=dtype,
        routed_experts=True,
        max_total_tokens=16384,
        max_running_requests=_CONCURRENCY,
    ) as rig:
        await rig.publish(dict(learners[True].policy.export_named_tensors()), 1)
        layout = read_layout(model)
        url = rig.pool.engines["engine0"].url
        batches = [
            [
                batch.from_proto(record, _VOCAB)
                for record in await _sample(url, layout, num_groups, num_tokens, seed)
            ]
            for seed in range(max(_STALENESS) + 1)
        ]
    rows: list[dict[str, Any]] = []

    def row(metric: str, value: float, baseline: float | None, unit: str) -> None:
        ratio = None if baseline is None else value / baseline if baseline else None
        spread = {"repeats": 1, "min": value, "max": value}
        rows.append(
            {
                "metric": f"{dtype}_{metric}",
                "value": value,
                "unit": unit,
                "baseline": baseline,
                "ratio": ratio,
                **spread,
            }
        )

    observed, further = batches[0], batches[1:]
    row("num_tokens_scored", float(sum(s.num_trained for s in observed)), None, "tokens")
    by_pair, by_token = _routing_differs(learners[False], observed)
    row("routing_differs_token_and_layer", by_pair, None, "fraction")
    row("routing_differs_token", by_token, None, "fraction")
    done = 0
    for staleness in _STALENESS:
        for replay, own in learners.items():
            for step in range(done + 1, staleness + 1):
                _rl_step(own, further[step - 1], step, replay)
        done = staleness
        scores = {replay: _score(own, observed, replay) for replay, own in learners.items()}
        for name in sorted(scores[True]):
            if name.startswith(("ess_", "gap_total_")):
                unit = "nats" if name.startswith("gap_") else "fraction"
                metric = name.replace("gap_total_", "gap_") + f"_staleness{staleness}"
                row(metric, scores[True][name], scores[False][name], unit)
    return rows


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone, few tokens")
    parser.add_argument("--json", type=Path, help="write rows here; an absolute path")
    arguments = parser.parse_args()
    began = time.monotonic()
    dtypes: tuple[Dtype, ...] = ("bfloat16",) if arguments.quick else ("bfloat16", "float32")
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(prefix="routing-gap-", dir="/tmp") as folder:
            rows += asyncio.run(_measure(dtype, arguments.quick, Path(folder)))
    print(f"device cpu ({platform.machine()}), 1 thread; model {json.dumps(_MODEL)}")
    print(f"{'metric':58s} {'with replay':>12s} {'without':>12s}")
    for found in rows:
        baseline = "" if found["baseline"] is None else f"{found['baseline']:12.3e}"
        if found["unit"] == "fraction":
            baseline = "" if found["baseline"] is None else f"{found['baseline']:12.6f}"
        value = f"{found['value']:12.3e}" if found["unit"] == "nats" else f"{found['value']:12.6f}"
        print(f"{found['metric']:58s} {value} {baseline}")
    print(f"took {time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
