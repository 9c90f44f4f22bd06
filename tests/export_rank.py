"""One rank of a trainer that only exports and scores: the real model, bridge and publisher.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=p python -P -m tests.export_rank \\
        --model-dir DIR --tensor-parallel 2 --expert-parallel 2 --manager HOST:PORT

Owner: weight_sync_test. Rank 0 reads orders from stdin, one JSON object a line, and answers each
with one on stdout; the other ranks follow. Before each order the weights are read again from DIR.

    {"do": "publish", "version": 2, "transport": "tcp"}   -> {"engines": [...], "num_bytes": n}
    {"do": "score", "version": 2, "sequences": FILE}      -> {"differences": [...]}, one rank only

`score` takes the tokens that were sampled at the version and gives trainer minus rollout log-prob
of each, in nats, by the code that a training step uses.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from proto.serving import dial
from rollout.client import RolloutClient, read_sequences
from trainer import device as devices
from trainer.config import GridConfig
from weightsync.config import WeightSyncConfig
from weightsync.publisher import PublishResult, WeightPublisher

_COLLECTIVE_TIMEOUT_S = 120.0
_TOKEN_BUDGET = 4096
_LOGPROB_CHUNK = 1024
# Small, so that an update takes many buckets.
_BUCKET_BYTES = 128 * 1024


async def _publish(
    tensors: list[tuple[str, torch.Tensor]], order: dict[str, Any], manager: str
) -> PublishResult:
    async with dial(manager) as channel:
        config = WeightSyncConfig(transport=order["transport"], bucket_bytes=_BUCKET_BYTES)
        publisher = WeightPublisher(config, RolloutClient(channel))
        return await publisher.publish(tensors, order["version"])


def _score(policy: Any, order: dict[str, Any]) -> list[float]:
    from trainer.batch import from_proto, make_micro_batches
    from trainer.step import Learner

    sequences = []
    for record in read_sequences(Path(order["sequences"])):
        sequence = from_proto(record, policy.vocab_size)
        mask = sequence.loss_mask & (sequence.versions == order["version"])
        sequences.append(dataclasses.replace(sequence, loss_mask=mask))
    micros = make_micro_batches(
        sequences, _TOKEN_BUDGET, policy.vocab_size, policy.device.torch_device
    )
    logprobs = Learner(policy, _LOGPROB_CHUNK).logprobs(micros)
    differences: list[float] = []
    for micro, ours in zip(micros, logprobs, strict=True):
        differences += (ours - micro.rollout).tolist()
    return differences


def _orders() -> Any:
    """Rank 0's orders, on every rank; ends at the end of its stdin."""
    while True:
        line = [sys.stdin.readline() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(line, 0)
        if not line[0]:
            return
        yield json.loads(line[0])


def main() -> None:
    """Serves orders until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--tensor-parallel", type=int, required=True)
    parser.add_argument("--expert-parallel", type=int, required=True)
    parser.add_argument("--manager", required=True)
    arguments = parser.parse_args()
    device = devices.enter(num_threads=1, collective_timeout_s=_COLLECTIVE_TIMEOUT_S)
    from trainer.model import Policy

    grid = GridConfig(
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=1,
        expert_parallel=arguments.expert_parallel,
        data_parallel=int(os.environ["WORLD_SIZE"]) // arguments.tensor_parallel,
    )
    policy = Policy(arguments.model_dir, grid, device, seed=0)
    is_first = dist.get_rank() == 0
    if is_first:
        print(json.dumps({"num_parameters": policy.num_parameters}), flush=True)
    for order in _orders():
        policy.load_hf()
        answer: dict[str, Any] = {}
        if order["do"] == "score":
            answer = {"differences": _score(policy, order)}
        else:
            tensors = list(policy.export_named_tensors())
            if is_first:
                result = asyncio.run(_publish(tensors, order, arguments.manager))
                answer = {"engines": result.engines, "num_bytes": result.num_bytes}
        if is_first:
            print(json.dumps(answer), flush=True)
    devices.leave()


if __name__ == "__main__":
    main()
