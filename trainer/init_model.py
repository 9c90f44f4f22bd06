"""Fills a Hugging Face folder with random weights.

    python -P -m trainer.init_model --model-dir DIR --seed 0

DIR holds config.json of an architecture that architecture.py knows. Adds model.safetensors: float32,
Hugging Face names; matrices N(0, 0.02^2), norms 1. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import architecture
from trainer.errors import BadRequestError

if TYPE_CHECKING:
    import torch

_STD = 0.02


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Draws the weights. Norms (one-dimensional) are 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * _STD
        for name, shape in architecture.tensor_shapes(config).items()
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Fill a model folder with random weights.")
    parser.add_argument("--model-dir", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args(argv)
    try:
        config = architecture.read_config(args.model_dir)
    except BadRequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from safetensors.torch import save_file

    weights = random_weights(config, args.seed)
    partial = args.model_dir / ".model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes files that only their owner may read
    partial.replace(args.model_dir / "model.safetensors")
    count = sum(t.numel() for t in weights.values())
    print(f"{args.model_dir}/model.safetensors: {len(weights)} tensors, {count} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
