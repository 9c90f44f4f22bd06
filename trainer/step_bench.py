"""Supervised training speed: our trainer's step against transformers + torch AdamW.

    ./bazelw run //trainer:step_bench -- [--quick] [--json PATH]

Both train the same model on the same batches in one process, one torch thread each, in turn.
The baseline pads a batch to its longest row, as plain transformers training does, and computes
logits of every position. Both losses are printed: they must agree.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROWS = 32
_VOCAB = 480


def _batches(count: int) -> list[Any]:
    import numpy as np

    from trainer import batch, testbed

    rng = np.random.default_rng(0)

    def row() -> Any:
        length = int(rng.integers(70, 151))
        mask = np.arange(length) >= length // 2
        return batch.from_proto(testbed.record(rng.integers(6, _VOCAB, length), mask), _VOCAB)

    return [[row() for _ in range(_ROWS)] for _ in range(count)]


def _ours(folder: Path) -> Callable[[int, list[Any]], float]:
    from trainer import batch, device
    from trainer.config import GridConfig, OptimConfig
    from trainer.model import Policy
    from trainer.step import Learner

    policy = Policy(folder, GridConfig(), device.enter(1, 60.0), seed=0)
    policy.load_hf()
    learner = Learner(policy, 8192)
    optim = OptimConfig(lr=1e-3, warmup_steps=0, final_lr_fraction=1.0, weight_decay=0.01)
    learner.begin_stage(optim, 100, router_aux_loss=0.0)

    def step(number: int, rows: list[Any]) -> float:
        micros = batch.make_micro_batches(rows, 8192, _VOCAB, policy.device.torch_device)
        num_trained = sum(r.num_trained for r in rows)
        return learner.update(micros, lambda _, __, new: -new.sum() / num_trained, number).loss

    return step


def _baseline(folder: Path) -> Callable[[int, list[Any]], float]:
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def step(_: int, rows: list[Any]) -> float:
        longest = max(len(r.token_ids) for r in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
            mask[i, : len(row.token_ids)] = torch.from_numpy(row.loss_mask)
        logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1)
        picked = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        loss = -picked[mask[:, 1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def _model(folder: Path) -> Path:
    from trainer import testbed

    sizes = {"vocab_size": _VOCAB, "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32}
    experts = {"num_experts": 8, "moe_intermediate_size": 128}
    return testbed.write_model(folder, **sizes, **experts)


def _row(ours: list[float], theirs: list[float]) -> dict[str, object]:
    value, baseline = statistics.median(ours), statistics.median(theirs)
    return {
        "metric": "sft_tokens_per_s",
        "value": value,
        "unit": "tokens/s",
        "baseline": baseline,
        "ratio": value / baseline,
        "repeats": len(ours),
        "min": min(ours),
        "max": max(ours),
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 20")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    repeats = 5 if args.quick else 20
    with tempfile.TemporaryDirectory() as folder:
        _model(Path(folder))
        steps = {"ours": _ours(Path(folder)), "theirs": _baseline(Path(folder))}
        speeds: dict[str, list[float]] = {name: [] for name in steps}
        losses: dict[str, list[float]] = {name: [] for name in steps}
        for number, rows in enumerate(_batches(repeats + 2), 1):
            tokens = sum(len(r.token_ids) for r in rows)
            for name, step in steps.items():
                begun = time.perf_counter()
                losses[name].append(step(number, rows))
                if number > 2:  # the first ones warm up
                    speeds[name].append(tokens / (time.perf_counter() - begun))
    row = _row(speeds["ours"], speeds["theirs"])
    difference = max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True))
    print(f"device cpu ({platform.machine()}), 1 thread, float32")
    print(f"Qwen3-MoE hidden 128, 4 layers, 8 experts top-2; {_ROWS} rows of 70-150 tokens")
    print(
        f"trainer {row['value']:.0f} tokens/s ({row['min']:.0f}-{row['max']:.0f}, {repeats} steps), "
        f"transformers + AdamW {row['baseline']:.0f}: ratio {row['ratio']:.2f}; "
        f"largest difference of the losses {difference:.1e}"
    )
    if args.json:
        args.json.write_text(json.dumps([row], indent=1) + "\n")
    return 0 if difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
