"""Whether it would pay to send only what an optimizer step changed: the sums behind leaving it out.

`--quick` stays under a minute; `--json PATH` writes rows {metric, value, unit, baseline, ratio,
repeats, min, max}. A bf16 weight changes when its float32 master crosses a rounding boundary. Rows:

    changed_*     share of weights, and of blocks, that one AdamW step changes in bf16, for gradients
                  of pure noise and for gradients that always point one way; N(0, 0.02) weights
    compare       finding the changed 64-byte blocks of two copies: the least that any delta costs
    encode        the same, and gathering those blocks
    break_even    rate of the link below which sending only those blocks is faster, whichever
                  gradients are better for it: blocks saved / time to encode

The gradients are synthetic: a real policy's lie between the two. One thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LEARNING_RATE = 1e-6
_STEPS = 30
"""Before the step that is looked at, so that the moments have settled."""
_STD = 0.02
_BLOCK_BYTES = (64, 256)


def _row(
    metric: str, values: list[float], unit: str, baseline: str = "", ratio: float = 1.0
) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": round(statistics.median(values), 4),
        "unit": unit,
        "baseline": baseline,
        "ratio": round(ratio, 4),
        "repeats": len(values),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def _step(num_weights: int, is_noise: bool, seed: int) -> tuple[Any, Any]:
    """bf16 weights before and after one AdamW step of their float32 masters."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    master = torch.nn.Parameter(torch.randn(num_weights, generator=generator) * _STD)
    optimizer = torch.optim.AdamW([master], lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    before = master
    for _ in range(_STEPS):
        noise = torch.randn(num_weights, generator=generator)
        master.grad = noise if is_noise else noise.abs()
        before = master.detach().to(torch.bfloat16)
        optimizer.step()
    return before, master.detach().to(torch.bfloat16)


def _changed(before: Any, after: Any, block_bytes: int) -> float:
    import torch

    is_equal = before.view(torch.int16) == after.view(torch.int16)
    return 1 - float(is_equal.view(-1, block_bytes // 2).all(dim=1).float().mean())


def _bench_changes(num_weights: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for kind in ("noise", "one_way"):
        steps = [_step(num_weights, kind == "noise", seed) for seed in range(repeats)]
        for name, size in [("weights", 2), *((f"blocks_{n}", n) for n in _BLOCK_BYTES)]:
            values = [100 * _changed(*step, size) for step in steps]
            rows.append(_row(f"changed_{name}_{kind}", values, "%"))
    return rows


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    times_s = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started_s)
    return times_s


def _bench_encoding(num_bytes: int, share: float, repeats: int) -> list[dict[str, Any]]:
    """Comparing two copies, and gathering `share` of their blocks."""
    import torch

    words = _BLOCK_BYTES[0] // 8
    old = torch.zeros(num_bytes // 8, dtype=torch.int64)
    new = old.clone().view(-1, words)
    new[torch.rand(len(new)) < share, 0] = 1
    new = new.view(-1)
    copy = torch.empty_like(new)

    def compare() -> Any:
        return torch.ne(old, new).view(-1, words).any(dim=1)

    def encode() -> Any:
        return new.view(-1, words)[compare()]

    memcpy = statistics.median(_times(lambda: copy.copy_(new), repeats))
    rows = []
    for name, call in (("compare", compare), ("encode", encode)):
        times_s = _times(call, repeats)
        rates = [num_bytes / t / 1e9 for t in times_s]
        rows.append(
            _row(
                name,
                rates,
                "GB/s",
                f"memcpy {num_bytes / memcpy / 1e9:.2f} GB/s",
                memcpy / statistics.median(times_s),
            )
        )
    return rows


def main() -> None:
    """Prints the table, and writes it where --json says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the size")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    num_weights, num_bytes = (2**21, 2**27) if arguments.quick else (2**24, 2**30)
    rows = _bench_changes(num_weights, repeats=3)
    by_name = {row["metric"]: row["value"] for row in rows}
    best = min(by_name[f"changed_blocks_{_BLOCK_BYTES[0]}_{kind}"] for kind in ("noise", "one_way"))
    rows += _bench_encoding(num_bytes, best / 100, repeats=5)
    saved = 1 - best / 100
    rows.append(_row("break_even", [saved * rows[-1]["value"]], "GB/s"))
    print(
        f"{platform.machine()}, 1 thread; AdamW, lr {_LEARNING_RATE:g}, {num_weights:,} weights; "
        f"copies of {num_bytes >> 20} MiB, torch {torch.__version__}"
    )
    for row in rows:
        print(
            f"{row['metric']:28} {row['value']:9.3f} {row['unit']:5} {row['baseline']:22} "
            f"({row['repeats']} repeats, {row['min']:.3f}..{row['max']:.3f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
