"""Weight updates on a real SGLang server, through the real pool, windows, publisher and loader."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollout.engines.engine_rig import (
    BANNED,
    TOLERANCE_NATS,
    Rig,
    differences,
    open_rig,
    shared_memory,
)
from rollout.engines.faulty_loader import LOADER, VARIABLE
from rollout.engines.tiny_moe import expected_checksums, make_weights
from weightsync.errors import PublishError
from weightsync.weight_digest import WeightDigest, tensor_checksum


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While it is there, engines load tensors under other names."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.fixture
async def rig(tmp_path: Path, fault: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, ("shm", "tcp"), loader=LOADER) as opened:
        yield opened


def digest_of(weights: dict[str, torch.Tensor]) -> int:
    digest = WeightDigest()
    for name, tensor in weights.items():
        digest.add(name, tensor_checksum(tensor))
    return digest.value


async def test_updates_of_a_live_engine(rig: Rig, fault: Path) -> None:
    engine = rig.pool.engines["engine0"]
    first, second = make_weights(1), make_weights(2)

    # The first publication waits for the engine to start, and makes it serve.
    published = await rig.publish(first, 1)
    assert published.engines == ("engine0",)
    assert (engine.state, engine.weight_version) == ("serving", 1)
    assert published.per_engine["engine0"].digest == digest_of(first)
    # The pad rows of the embedding are SGLang's own, so its digest is not compared.
    expected = expected_checksums(first)
    found = await rig.checksums()
    assert {name: found[name] for name in expected} == expected

    # Log-probs are those of the masked, tempered softmax.
    num_requests = 0
    for temperature in (1.0, 0.7):
        answer = await rig.generate(60, temperature)
        num_requests += 1
        assert not set(answer["output_ids"]) & set(BANNED)
        assert max(differences(first, answer, temperature)) <= TOLERANCE_NATS
        assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 60}]

    # An update while a request runs, over TCP: every token matches the version of its span.
    running = asyncio.create_task(rig.generate(500))
    num_requests += 1
    await asyncio.sleep(0.5)
    await rig.publish(second, 2, "tcp")
    answer = await running
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "2"]
    assert (spans[0]["start"], spans[0]["end"]) == (0, spans[1]["start"])
    assert spans[1]["end"] == 500
    assert 0 < spans[1]["start"] < 500
    under_first, under_second = differences(first, answer), differences(second, answer)
    assert max(under_first[: spans[0]["end"]]) <= TOLERANCE_NATS
    assert max(under_second[spans[1]["start"] :]) <= TOLERANCE_NATS
    assert max(under_first[spans[1]["start"] :]) > 0.1  # the comparison can tell them apart
    expected = expected_checksums(second)
    found = await rig.checksums()
    assert {name: found[name] for name in expected} == expected

    # The engine's own counters are exact: health checks and updates add nothing.
    async with asyncio.timeout(10):
        while engine.num_requests < num_requests:
            await asyncio.sleep(0.1)
    assert (engine.num_requests, engine.num_generated_tokens) == (num_requests, 620)

    # An update that lacks a tensor, or has one of another shape, is refused before it touches
    # anything.
    name = "model.layers.1.self_attn.q_proj.weight"
    lacking, misshapen = make_weights(3), make_weights(3)
    del lacking[name]
    misshapen[name] = misshapen[name].reshape(-1, 2)
    for weights, said in ((lacking, f"it lacks {name};"), (misshapen, rf"{name} has shape \[")):
        with pytest.raises(PublishError, match=said):
            await rig.publish(weights, 3)
    assert (engine.state, engine.weight_version, engine.num_restarts) == ("serving", 2, 0)
    answer = await rig.generate(20)
    assert max(differences(second, answer)) <= TOLERANCE_NATS
    assert answer["meta_info"]["weight_version"] == "2"

    # One that the model loads wrongly costs the engine its process; a full update restores it.
    fault.write_text("layers.1.mlp.experts.3.gate_proj layers.1.mlp.experts.3.up_proj")
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    with pytest.raises(PublishError, match=f"ArrivalError: 1 of .* {name} in .*w13_weight"):
        await rig.publish(make_weights(4), 4)
    fault.unlink()
    assert (engine.state, engine.weight_version) == ("starting", 0)
    assert name in engine.detail
    await rig.publish(make_weights(5), 5)
    assert (engine.state, engine.weight_version, engine.num_restarts) == ("serving", 5, 1)
    answer = await rig.generate(20)
    assert max(differences(make_weights(5), answer)) <= TOLERANCE_NATS
    assert answer["meta_info"]["weight_version"] == "5"
    assert [row[2] for row in rig.store.saved if row[0] == 1] == [
        "pause",
        "begin",
        "buckets",
        "commit",
        "closed",
    ]

    # Nothing is left behind.
    folder = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert folder.read_text().split()
    await rig.pool.close()
    assert not folder.read_text().split()
    assert shared_memory() <= rig.shared_memory_before


async def test_updates_of_an_engine_of_two_ranks(tmp_path: Path, fault: Path) -> None:
    first, second = make_weights(6), make_weights(7)
    async with open_rig(tmp_path, ("shm", "tcp"), tensor_parallel=2, loader=LOADER) as rig:
        engine = rig.pool.engines["engine0"]
        for version, weights, transport in ((1, first, "shm"), (2, second, "tcp")):
            published = await rig.publish(weights, version, transport)
            assert (engine.state, engine.weight_version) == ("serving", version)
            assert published.per_engine["engine0"].digest == digest_of(weights)
            expected = expected_checksums(weights)
            ranks = [await rig.checksums(rank) for rank in range(2)]
            for found in ranks:  # both have all of what is not divided
                whole = {name for name in expected if "norm" in name or "gate" in name}
                assert {name: found[name] for name in whole} == {n: expected[n] for n in whole}
            divided = "model.layers.0.mlp.experts.w13_weight"
            assert len({found[divided] for found in ranks}) == 2
            answer = await rig.generate(60)
            assert max(differences(weights, answer)) <= TOLERANCE_NATS

        # One rank's fault is the engine's.
        fault.write_text("layers.0.self_attn.k_proj layers.0.self_attn.gone")
        with pytest.raises(PublishError, match=r"rank 1: ArrivalError: .*0\.self_attn\.k_proj"):
            await rig.publish(make_weights(8), 3)
        assert engine.state == "starting"
    assert shared_memory() <= rig.shared_memory_before
