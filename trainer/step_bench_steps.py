"""The steps that step_bench times: our trainer's, and the same in transformers with torch AdamW.

A batch is a list of rows; all steps train the same tokens of it with the same loss. The baselines lay
it out in the two ways that transformers knows without a kernel of another package:
  padded  rows side by side, as long as the longest
  packed  rows end to end in one, with positions that restart; it masks the pairs of rows
Both compute logits of every position, as its models do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["sft", "grpo"]
Layout = Literal["padded", "packed"]
Step = Callable[[int, list[Any]], float]
"""(number of the step, rows) -> loss."""

NUM_ROWS = 32
VOCAB = 480
_LR, _BETAS, _DECAY, _CLIP = 1e-3, (0.9, 0.95), 0.01, 1.0
_TOKEN_BUDGET = 8192


def write_model(folder: Path) -> Path:
    """A Qwen3-MoE of 1.8 million parameters."""
    from trainer import testbed

    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32}
    experts = {"num_experts": 8, "moe_intermediate_size": 128}
    return testbed.write_model(folder, **sizes, **experts)


def batches(count: int) -> list[list[Any]]:
    """Batches of NUM_ROWS sampled rows of 70 to 150 ids, the later half trained."""
    from trainer import batch, testbed

    rng = np.random.default_rng(0)

    def row(index: int) -> Any:
        length = int(rng.integers(70, 151))
        mask = np.arange(length) >= length // 2
        logprobs = -np.log(VOCAB) + 0.1 * rng.standard_normal(length)
        record = testbed.record(
            rng.integers(6, VOCAB, length), mask, logprobs=logprobs, attempt_id=str(index)
        )
        return batch.from_proto(record, VOCAB)

    return [[row(i) for i in range(NUM_ROWS)] for _ in range(count)]


def advantages() -> np.ndarray[Any, np.dtype[np.float32]]:
    """One a row, of both signs; their sum is 0."""
    return np.where(np.arange(NUM_ROWS) % 2, 1.0, -1.0).astype(np.float32)


def ours(folder: Path, kind: Kind, separate_pass: bool = False) -> Step:
    """Our step. separate_pass: the old log-probs are computed apart, before the update."""
    import torch

    from trainer import batch, device, loss
    from trainer.config import GridConfig, LossConfig, OptimConfig
    from trainer.model import Policy
    from trainer.step import Learner

    policy = Policy(folder, GridConfig(), device.enter(1, 60.0), seed=0)
    policy.load_hf()
    learner = Learner(policy, _TOKEN_BUDGET)
    optim = OptimConfig(lr=_LR, warmup_steps=0, final_lr_fraction=1.0, weight_decay=_DECAY)
    learner.begin_stage(optim, 1_000_000, router_aux_loss=0.0)
    advantage = torch.from_numpy(advantages())

    def step(number: int, rows: list[Any]) -> float:
        micros = batch.make_micro_batches(rows, _TOKEN_BUDGET, VOCAB, policy.device.torch_device)
        num_trained = sum(r.num_trained for r in rows)
        if kind == "sft":
            return learner.update(micros, lambda _, __, new: -new.sum() / num_trained, number).loss
        old = learner.logprobs(micros) if separate_pass else None

        def loss_of(i: int, micro: batch.MicroBatch, new: torch.Tensor) -> torch.Tensor:
            tokens = loss.TokenBatch(
                new=new,
                old=new.detach() if old is None else old[i],
                rollout=micro.rollout,
                advantage=advantage[micro.sequence],
                mask=torch.ones_like(new, dtype=torch.bool),
                weight=torch.full_like(new, 1 / num_trained),
                sequence=micro.sequence,
            )
            return loss.policy_loss(tokens, LossConfig()).loss

        return learner.update(micros, loss_of, number, with_entropy=True).loss

    return step


def baseline(folder: Path, kind: Kind, layout: Layout, separate_pass: bool = False) -> Step:
    """The same in transformers, with torch AdamW and the gradient clipped as ours."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=_BETAS, weight_decay=_DECAY)
    lay_out = _padded if layout == "padded" else _packed

    def step(_: int, rows: list[Any]) -> float:
        inputs, targets, mask, owner = lay_out(rows)

        def logprobs() -> torch.Tensor:
            every = torch.log_softmax(model(**inputs, use_cache=False).logits[:, :-1], -1)
            return every.gather(-1, targets[..., None])[..., 0][mask]

        if kind == "sft":
            loss = -logprobs().mean()
        else:
            with torch.no_grad():
                old = logprobs() if separate_pass else None
            new = logprobs()
            old = new.detach() if old is None else old
            rollout = torch.from_numpy(
                np.concatenate([r.rollout_logprobs[r.loss_mask] for r in rows])
            )
            advantage = torch.from_numpy(advantages())[owner]
            ratio, weight = (new - old).exp(), (old - rollout).exp().clamp(max=2.0)
            clipped = ratio.clamp(0.8, 1.28)
            loss = (weight * torch.maximum(-ratio * advantage, -clipped * advantage)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        return float(loss.detach())

    return step


def _padded(rows: list[Any]) -> tuple[dict[str, Any], Any, Any, Any]:
    """(inputs, targets [rows, longest - 1], which are trained, row of each trained one)."""
    import torch

    longest = max(len(r.token_ids) for r in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        mask[i, : len(row.token_ids)] = torch.from_numpy(row.loss_mask)
    # Padding stands right of what is trained, so that a causal row needs no mask for it.
    return {"input_ids": ids}, ids[:, 1:], mask[:, 1:], mask[:, 1:].nonzero()[:, 0]


def _packed(rows: list[Any]) -> tuple[dict[str, Any], Any, Any, Any]:
    """As _padded, of one row [1, tokens]."""
    import torch

    lengths = [len(r.token_ids) for r in rows]
    ids = torch.from_numpy(np.concatenate([r.token_ids for r in rows]).astype(np.int64))[None]
    mask = torch.from_numpy(np.concatenate([r.loss_mask for r in rows]))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    inputs = {"input_ids": ids, "position_ids": positions}
    return inputs, ids[:, 1:], mask[:, 1:], owner[1:][mask[0, 1:]]
