"""What weightsync_bench measures of a real SGLang server: one model of 1.3 GB, by every transport.

Owner: `run` starts the server and updates it. Each publication is whole, as a trainer pays for it:
windows, pauses and calls included, and for `disk` the writing of its files, to memory (/dev/shm), which
is the fastest disk there is. Transports take turns, so
that what else the machine does meanwhile falls on all. After the last update by each, the engine's own
checksums are compared with the weights'.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

TRANSPORTS = ("shm", "tcp", "distributed", "disk")
BUCKET_BYTES = 8 * 2**20


@dataclass(slots=True)
class EngineTimes:
    """Seconds of each repeat."""

    publish_s: list[float] = field(default_factory=list)
    """From the call to its return."""
    paused_s: list[float] = field(default_factory=list)
    """The part of it in which the engine generated nothing."""


async def run(repeats: int) -> tuple[int, dict[str, EngineTimes]]:
    """Bytes of the model, and the times of each transport.

    Raises RuntimeError when an engine's weights are not those that were published.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rollout.engines.engine_rig import open_rig
    from rollout.engines.tiny_moe import CONFIG, expected_checksums

    config = Qwen3MoeConfig.from_dict(
        CONFIG.to_dict()
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 16,
            "initializer_range": 0.02,
        }
    )
    with torch.no_grad():
        model = Qwen3MoeForCausalLM(config).float()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    weights.pop("lm_head.weight", None)
    times = {transport: EngineTimes() for transport in TRANSPORTS}
    version = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with open_rig(Path(folder), TRANSPORTS, config, BUCKET_BYTES) as rig:
            for repeat in range(repeats + 1):
                for transport in TRANSPORTS:
                    version += 1
                    for tensor in weights.values():
                        tensor.add_(1e-3)
                    started_s = time.monotonic()
                    result = await rig.publish(weights, version, transport)
                    if repeat > 0:  # the first pays for connections and first touches
                        times[transport].publish_s.append(time.monotonic() - started_s)
                        times[transport].paused_s.append(result.paused_s)
                    if repeat == repeats:
                        found = await rig.checksums()
                        wanted = await asyncio.to_thread(expected_checksums, weights, config)
                        if {name: found[name] for name in wanted} != wanted:
                            raise RuntimeError(f"after {transport} the engine has other weights")
    return sum(tensor.nbytes for tensor in weights.values()), times
