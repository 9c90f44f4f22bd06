"""A real SGLang server takes weights by its own calls: `disk` and `distributed`, in mid-generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollout.engines.engine_rig import TOLERANCE_NATS, Rig, differences, open_rig
from rollout.engines.tiny_moe import expected_checksums, make_weights
from weightsync.errors import PublishError


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, ("shm", "distributed", "disk")) as rig:
        yield rig


async def has(rig: Rig, weights: dict[str, torch.Tensor]) -> bool:
    """Whether the engine's own checksums are those of the weights."""
    expected = expected_checksums(weights)
    found = await rig.checksums()
    return {name: found[name] for name in expected} == expected


async def update_while_generating(rig: Rig, version: int, transport: str) -> None:
    """Version - 1 is there; every token matches the version of its span."""
    old, new = make_weights(version - 1), make_weights(version)
    running = asyncio.create_task(rig.generate(500))
    await asyncio.sleep(0.5)
    await rig.publish(new, version, transport)
    answer = await running
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [str(version - 1), str(version)]
    at = spans[1]["start"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, at, 500)
    assert 0 < at < 500
    assert max(differences(old, answer)[:at]) <= TOLERANCE_NATS
    assert max(differences(new, answer)[at:]) <= TOLERANCE_NATS
    assert await has(rig, new)


async def test_sglangs_own_calls_update_a_live_engine(rig: Rig, tmp_path: Path) -> None:
    engine = rig.pool.engines["engine0"]
    first = make_weights(1)
    await rig.publish(first, 1, "disk")
    assert (engine.state, engine.weight_version) == ("serving", 1)
    assert await has(rig, first)
    await update_while_generating(rig, 2, "distributed")
    await update_while_generating(rig, 3, "distributed")  # through the same group
    await update_while_generating(rig, 4, "disk")
    # Between SGLang's calls and our loader one may change at any time.
    await update_while_generating(rig, 5, "shm")
    await update_while_generating(rig, 6, "distributed")
    assert not list((tmp_path / "updates").iterdir())
    assert engine.num_restarts == 0

    # An update that breaks half-way: the engine is restarted, and joins again.
    broken = make_weights(7)
    name = "model.layers.1.self_attn.q_proj.weight"
    broken[name] = broken[name].reshape(-1, 2)
    with pytest.raises(PublishError, match="got status 400"):
        await rig.publish(broken, 7, "distributed")
    assert (engine.state, engine.weight_version) == ("starting", 0)
    await rig.publish(make_weights(8), 8, "distributed")
    assert (engine.state, engine.weight_version, engine.num_restarts) == ("serving", 8, 1)
    assert await has(rig, make_weights(8))
