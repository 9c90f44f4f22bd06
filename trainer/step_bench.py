"""The trainer's step against transformers + torch AdamW, and its memory for one long sequence.

    ./bazelw run //trainer:step_bench -- [--quick] [--only speed|memory] [--json PATH]

speed   SFT and GRPO on the same model and batches in one process, one torch thread, in paired
        rounds whose order turns; then GRPO with the separate log-prob pass. All losses must agree.
memory  Peak of one GRPO step on one sequence of 65,536 tokens (--quick: 16,384), one layer, with
        and without chunked log-probs and recompute, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WARM_UP = 2
_CHUNK = 4096
_VOCAB = 8192  # for memory: what a process without chunks can hold of 65,536 rows of logits
_REAL_VOCAB = 151_936
_PROBE_TIMEOUT_S = 900.0

Row = dict[str, Any]


def _row(metric: str, unit: str, values: list[float], baselines: list[float]) -> Row:
    """Medians, and the spread of the paired ratios."""
    value, baseline = statistics.median(values), statistics.median(baselines)
    ratios = [a / b for a, b in zip(values, baselines, strict=True)]
    return {
        "metric": metric,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "ratio": statistics.median(ratios),
        "repeats": len(values),
        "min": min(values),
        "max": max(values),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _speed(repeats: int) -> tuple[list[Row], float]:
    """Rows, and the largest difference of losses that should be equal."""
    from trainer import step_bench_steps as steps

    with tempfile.TemporaryDirectory() as name:
        folder = steps.write_model(Path(name))
        racers = {
            "sft": steps.ours(folder, "sft"),
            "sft padded": steps.baseline(folder, "sft", "padded"),
            "sft packed": steps.baseline(folder, "sft", "packed"),
            "grpo": steps.ours(folder, "grpo"),
            "grpo padded": steps.baseline(folder, "grpo", "padded"),
            "grpo packed": steps.baseline(folder, "grpo", "packed"),
            "grpo pass": steps.ours(folder, "grpo", separate_pass=True),
            "grpo padded pass": steps.baseline(folder, "grpo", "padded", separate_pass=True),
        }
    seconds: dict[str, list[float]] = {name: [] for name in racers}
    speeds: dict[str, list[float]] = {name: [] for name in racers}
    difference = 0.0
    for number, rows in enumerate(steps.batches(repeats + _WARM_UP), 1):
        losses: dict[str, list[float]] = {"sft": [], "grpo": []}
        order = list(racers) if number % 2 else list(reversed(racers))
        for name in order:
            begun = time.perf_counter()
            loss = racers[name](number, rows)
            took = time.perf_counter() - begun
            losses[name.split()[0]].append(loss)
            if number > _WARM_UP:
                seconds[name].append(took)
                speeds[name].append(sum(len(r.token_ids) for r in rows) / took)
        difference = max(difference, *(max(values) - min(values) for values in losses.values()))
    unit = "tokens/s"
    rows_out = [
        _row("sft_tokens_per_s", unit, speeds["sft"], speeds["sft padded"]),
        _row("sft_tokens_per_s_packed_baseline", unit, speeds["sft"], speeds["sft packed"]),
        _row("grpo_tokens_per_s", unit, speeds["grpo"], speeds["grpo padded"]),
        _row("grpo_tokens_per_s_packed_baseline", unit, speeds["grpo"], speeds["grpo packed"]),
        _row(
            "grpo_tokens_per_s_separate_pass", unit, speeds["grpo pass"], speeds["grpo padded pass"]
        ),
        _row("grpo_step_s_without_separate_pass", "s", seconds["grpo"], seconds["grpo pass"]),
    ]
    return rows_out, difference


def _probe(num_tokens: int, *options: str) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "trainer.step_bench_memory", "--tokens", str(num_tokens)]
    command += ["--vocab", str(_VOCAB), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _memory(num_tokens: int) -> tuple[list[Row], float]:
    """Rows, and the largest difference of losses."""
    whole = ("--chunk", str(num_tokens))
    chunked = ("--chunk", str(_CHUNK))
    variants: dict[str, tuple[str, ...]] = {
        "whole_logits": whole,
        "whole_logits_recompute": (*whole, "--recompute"),
        "chunked": chunked,
        "chunked_recompute": (*chunked, "--recompute"),
    }
    results = {name: _probe(num_tokens, *options) for name, options in variants.items()}
    rows = []
    for name, result in results.items():
        row = _row(
            f"peak_bytes_{num_tokens}_tokens_{name}",
            "bytes",
            [result["peak_bytes"]],
            [results["whole_logits"]["peak_bytes"]],
        )
        rows.append(row | {"seconds": result["seconds"]})
    losses = [result["loss"] for result in results.values()]
    return rows, max(losses) - min(losses)


def _show_speed(rows: list[Row], difference: float) -> None:
    from trainer.step_bench_steps import NUM_ROWS

    print(f"device cpu ({platform.machine()}), 1 thread, float32")
    print(f"Qwen3-MoE hidden 128, 4 layers, 8 experts top-2; {NUM_ROWS} rows of 70-150 tokens")
    for row in rows:
        print(
            f"{row['metric']}: {row['value']:.4g} {row['unit']} ({row['min']:.4g}-{row['max']:.4g}), "
            f"baseline {row['baseline']:.4g}; ratio {row['ratio']:.2f} "
            f"({row['ratio_min']:.2f}-{row['ratio_max']:.2f}), {row['repeats']} paired rounds"
        )
    print(f"the separate log-prob pass takes {1 - rows[-1]['ratio']:.1%} of a step that has one")
    print(f"largest difference of the losses {difference:.1e}")


def _show_memory(rows: list[Row], num_tokens: int, difference: float) -> None:
    print(
        f"one GRPO step on one sequence of {num_tokens} tokens, one layer (Qwen3 dense, hidden 128), "
        f"vocabulary {_VOCAB}, log-prob chunk {_CHUNK}; one process each"
    )
    for row in rows:
        print(
            f"{row['metric']}: {row['value'] / 1e9:.2f} GB, {row['ratio']:.2f} of whole logits, "
            f"{row['seconds']:.0f} s"
        )
    copy = num_tokens * _REAL_VOCAB * 4 / 1e9
    print(
        f"at a vocabulary of {_REAL_VOCAB} each copy of whole logits would be {copy:.1f} GB, of a "
        f"chunk's {_CHUNK * _REAL_VOCAB * 4 / 1e9:.1f}; largest difference of the losses "
        f"{difference:.1e}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code, 1 when losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="5 rounds, not 20; 16,384 tokens")
    parser.add_argument("--only", choices=("speed", "memory"), help="half of it")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    worst = 0.0
    if args.only != "memory":
        rows, worst = _speed(5 if args.quick else 20)
        _show_speed(rows, worst)
    if args.only != "speed":
        num_tokens = 16_384 if args.quick else 65_536
        memory, difference = _memory(num_tokens)
        _show_memory(memory, num_tokens, difference)
        rows, worst = rows + memory, max(worst, difference)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
