"""Peak memory of one step on one long sequence, measured in a process of its own.

    python -P -m trainer.step_bench_memory --tokens 65536 --chunk 4096 --recompute

Prints JSON: `peak_bytes`, the most memory that was resident in the step beyond what was before it
(weights, gradients and the empty optimizer), `resident_bytes` before it, and `seconds`. Linux only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path


def _resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(num_tokens: int, vocab: int, num_layers: int, chunk: int, recompute: bool) -> dict:
    """Takes one GRPO step on one sequence of which all but the first 64 tokens are trained."""
    import numpy as np
    import torch

    from trainer import batch, device, loss, testbed
    from trainer.config import GridConfig, LossConfig, OptimConfig
    from trainer.model import Policy
    from trainer.step import Learner

    sizes = {
        "vocab_size": vocab,
        "hidden_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": num_tokens,
        **testbed.FAMILIES["qwen3"],
        "intermediate_size": 384,
    }
    entered = device.enter(1, 60.0)
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(testbed.write_model(Path(folder), **sizes), GridConfig(), entered, seed=0)
        policy.load_hf()
    policy.set_recompute(recompute)
    learner = Learner(policy, chunk)
    learner.begin_stage(OptimConfig(), 10, router_aux_loss=0.0)
    rng = np.random.default_rng(0)
    logprobs = [-float(np.log(vocab))] * num_tokens
    row = testbed.record(
        rng.integers(6, vocab, num_tokens), np.arange(num_tokens) >= 64, logprobs=logprobs
    )
    micros = batch.make_micro_batches(
        [batch.from_proto(row, vocab)], num_tokens, vocab, policy.device.torch_device
    )
    (num_trained,) = {m.targets.numel() for m in micros}

    def loss_of(_: int, micro: batch.MicroBatch, new: torch.Tensor) -> torch.Tensor:
        tokens = loss.TokenBatch(
            new=new,
            old=new.detach(),
            rollout=micro.rollout,
            advantage=torch.ones_like(new),
            mask=torch.ones_like(new, dtype=torch.bool),
            weight=torch.full_like(new, 1 / num_trained),
            sequence=micro.sequence,
        )
        return loss.policy_loss(tokens, LossConfig()).loss

    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    begun = time.perf_counter()
    update = learner.update(micros, loss_of, 1, with_entropy=True)
    return {
        "peak_bytes": _resident_bytes("VmHWM") - before,
        "resident_bytes": before,
        "seconds": time.perf_counter() - begun,
        "loss": update.loss,
        "grad_norm": update.grad_norm,
    }


def main() -> None:
    """Measures once."""
    parser = argparse.ArgumentParser(description="Peak memory of one step on one long sequence.")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument(
        "--chunk", type=int, default=4096, help="trained tokens with logits at once"
    )
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    result = measure(args.tokens, args.vocab, args.layers, args.chunk, args.recompute)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
