"""How long training stands still for a checkpoint: written beside it, and waited for.

    ./bazelw run //trainer:checkpoint_bench -- [--quick] [--json PATH]

One process trains one model; a save of every kind is measured in turn, in one run. The baseline of
`checkpoint_blocked` is the synchronous save of the same state, that of `step_during_save` a step
while nothing is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VOCAB = 4096
_ROWS = 4


def _learner(folder: Path, device: Any) -> Any:
    from trainer import testbed
    from trainer.config import GridConfig, OptimConfig
    from trainer.model import Policy
    from trainer.step import Learner

    sizes = {"vocab_size": _VOCAB, "hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    experts = {"num_experts": 8, "moe_intermediate_size": 512}
    testbed.write_model(folder, **sizes, **experts)
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    learner = Learner(policy, 8192)
    learner.begin_stage(OptimConfig(warmup_steps=0), 1000, router_aux_loss=0.0)
    return learner


def _stepper(learner: Any) -> Callable[[], float]:
    """Takes a step; returns its seconds."""
    import numpy as np

    from trainer import batch, testbed

    rng = np.random.default_rng(0)
    records = [testbed.record(rng.integers(6, _VOCAB, 64), np.ones(64)) for _ in range(_ROWS)]
    rows = [batch.from_proto(record, _VOCAB) for record in records]
    micros = batch.make_micro_batches(rows, 8192, _VOCAB, learner.policy.device.torch_device)
    num_trained = sum(row.num_trained for row in rows)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        begun = time.perf_counter()
        learner.update(micros, lambda _, __, new: -new.sum() / num_trained, number)
        return time.perf_counter() - begun

    return step


def _row(metric: str, unit: str, ours: list[float], baseline: list[float]) -> dict[str, Any]:
    value, base = statistics.median(ours), statistics.median(baseline) if baseline else None
    return {
        "metric": metric,
        "value": value,
        "unit": unit,
        "baseline": base,
        "ratio": value / base if base else None,
        "repeats": len(ours),
        "min": min(ours),
        "max": max(ours),
    }


def _measure(folder: Path, repeats: int) -> tuple[list[dict[str, Any]], str]:
    from trainer import device as devices
    from trainer.checkpoint import CheckpointStore, Progress
    from trainer.checkpoint_saver import CheckpointSaver

    device = devices.enter(1, 60.0)
    learner = _learner(folder / "model", device)
    step = _stepper(learner)
    saver = CheckpointSaver(CheckpointStore(folder / "checkpoints", kept=1), device)
    alone, beside, blocked, waited, written = ([] for _ in range(5))
    num_bytes = 0
    for repeat in range(repeats + 1):
        idle = [step() for _ in range(3)]
        sync = saver.save(learner, Progress("bench", repeat))
        saver.begin(learner, Progress("bench", repeat))
        busy = []
        saved = None
        while saved is None:
            busy.append(step())
            saved = saver.poll()
        num_bytes = saved.num_bytes
        if repeat:  # the first one makes the buffers
            alone += idle
            # The last step ended after the save did.
            beside += busy[:-1]
            waited.append(sync.blocked_s)
            blocked.append(saved.blocked_s)
            written.append(saved.write_s)
    rows = [
        _row("checkpoint_blocked", "s", blocked, waited),
        _row("checkpoint_write", "s", written, waited),
        _row("checkpoint_write_rate", "GB/s", [num_bytes / s / 1e9 for s in written], []),
    ]
    if beside:
        rows.append(_row("step_during_save", "s", beside, alone))
    return rows, f"{num_bytes / 1e6:.0f} MB of weights and optimizer state"


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 20")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; a temporary one"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_bench.", dir=args.folder))
    try:
        rows, what = _measure(folder, 5 if args.quick else 20)
    finally:
        shutil.rmtree(folder)
    print(f"device cpu ({platform.machine()}), 1 thread, float32, {what}, in {folder.parent}")
    for row in rows:
        beside = (
            f", baseline {row['baseline']:.3f}, ratio {row['ratio']:.2f}" if row["ratio"] else ""
        )
        print(
            f"{row['metric']}: {row['value']:.3f} {row['unit']} "
            f"({row['min']:.3f}-{row['max']:.3f}, {row['repeats']} repeats){beside}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
