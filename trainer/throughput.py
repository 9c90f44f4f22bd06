"""How much arithmetic a step is, and what share of the device's speed it reaches (MFU).

Model FLOPs, as PaLM's appendix B counts them (arXiv 2204.02311): those of matrix products that the
model itself asks for, forward once and backward twice; what recompute or a separate log-prob pass
adds is no use of the model and not counted. Differences: attention is causal, so that half of its
products count; the output layer counts for trained tokens only, as no other reaches it here.
The speed is a setting, or what a matrix product reaches on this device: an estimate either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer import architecture

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FORWARD_AND_BACKWARD = 3


class Throughput:
    """Figures of a run's steps."""

    def __init__(self, config: dict[str, Any], peak_flops_per_s: float, num_ranks: int = 1) -> None:
        """Args: config is config.json's content; the speed is that of one rank's device."""
        self._peak = peak_flops_per_s * num_ranks
        self._per_token, self._per_trained = 0.0, 0.0  # forward
        shapes = architecture.tensor_shapes(config)
        share = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
        for name, shape in shapes.items():
            if len(shape) != 2 or name in (_HEAD, _EMBEDDING):
                continue
            used = share if ".experts." in name else 1.0
            self._per_token += 2.0 * shape[0] * shape[1] * used
        rows, width = shapes[_EMBEDDING]  # the head's too, tied or not
        self._per_trained = 2.0 * rows * width
        heads = config["num_attention_heads"] * architecture.head_size(config)
        # Two products of T x T by heads, of which a causal row needs half.
        self._per_pair = 2.0 * heads * config["num_hidden_layers"]

    def step_flops(self, num_tokens: float, num_token_pairs: float, num_trained: float) -> float:
        """Of one optimizer step on a whole batch.

        Args:
          num_token_pairs: the squares of the sequences' lengths, summed.
          num_trained: tokens that reach the output layer.
        """
        forward = self._per_token * num_tokens + self._per_trained * num_trained
        return _FORWARD_AND_BACKWARD * (forward + self._per_pair * num_token_pairs)

    def scalars(self, step: Mapping[str, float]) -> dict[str, float]:
        """tokens_per_s, step_model_tflop, and the MFU of the whole step and of its update alone.

        Args:
          step: num_tokens, num_token_pairs and num_trained_tokens of the whole batch, and
            StepClock.scalars(). Without a token there are no figures.
        """
        if not step["num_tokens"]:
            return {}
        sizes = (step[f"num_{name}"] for name in ("tokens", "token_pairs", "trained_tokens"))
        flops = self.step_flops(*sizes)
        step_s, update_s = (max(step[f"time_{part}_s"], 1e-9) for part in ("step", "update"))
        return {
            "tokens_per_s": step["num_tokens"] / step_s,
            "step_model_tflop": flops / 1e12,
            "mfu_step_estimate": flops / (step_s * self._peak),
            "mfu_update_estimate": flops / (update_s * self._peak),
        }
