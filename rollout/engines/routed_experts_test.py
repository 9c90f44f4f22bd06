"""A real SGLang server tells the experts that it chose: those of Transformers' routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rollout.engines.engine_rig import BANNED, PROMPT, Rig, open_rig
from rollout.engines.tiny_moe import CONFIG, make_weights, reference_model
from rollout.experts import read_layout
from rollout.gateway.engine_client import EngineClient, Generation
from rollout.gateway.routing import Routing

_TOP_K = CONFIG.num_experts_per_tok


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, ("shm",), routed_experts=True) as rig:
        yield rig


def chosen(weights: dict[str, torch.Tensor], ids: list[int]) -> npt.NDArray[np.int64]:
    """Transformers' choice [T, L, K] at each token, sorted."""
    with torch.no_grad():
        logits = reference_model(weights)(torch.tensor([ids]), output_router_logits=True)
    layers = [layer.topk(_TOP_K, -1).indices for layer in logits.router_logits]
    result: npt.NDArray[np.int64] = torch.stack(layers, 1).sort(-1).values.numpy()
    return result


async def test_choices_of_sampled_read_and_cached_tokens(rig: Rig, tmp_path: Path) -> None:
    layout = read_layout(tmp_path / "model")
    assert (layout.num_layers, layout.top_k, layout.num_experts) == (2, 2, 8)

    async def sample(client: EngineClient, prompt: list[int], count: int, start: int) -> Generation:
        return await client.generate(
            rig.pool.engines["engine0"].url,
            f"r{len(prompt)}-{start}",
            prompt,
            max_new_tokens=count,
            temperature=1.0,
            stop_token_ids=[],
            banned_token_ids=BANNED,
            extra_key="",
            timeout_s=120.0,
            ignore_stops=True,
            routing=Routing(layout, start),
        )

    def told(generation: Generation) -> npt.NDArray[np.uint8]:
        ids = np.frombuffer(generation.experts, np.uint8)
        return np.sort(ids.reshape(-1, layout.num_layers, layout.top_k), -1)

    first, second = make_weights(1), make_weights(2)
    await rig.publish(first, 1)
    async with EngineClient(max_connections=4, connect_s=30.0, abort_timeout_s=30.0) as client:
        turn = await sample(client, PROMPT, 20, 0)
        ids = PROMPT + turn.ids
        assert np.array_equal(told(turn), chosen(first, ids)[:-1])
        # The next turn extends the first, whose tokens are cached; both ways of asking agree.
        longer = [*ids, 20, 21, 22]
        turn = await sample(client, longer, 10, len(ids) - 1)
        assert turn.cached_tokens > 0
        whole = longer + turn.ids
        wanted = chosen(first, whole)[:-1]
        assert np.array_equal(told(turn), wanted[len(ids) - 1 :])
        again = await sample(client, longer, 1, 0)
        assert np.array_equal(told(again), wanted[: len(longer)])
        # An update reads the tokens of running turns again, and the later choice stands.
        running = asyncio.create_task(sample(client, PROMPT, 1000, 0))
        while rig.pool.engines["engine0"].num_running == 0:
            assert not running.done()
            await asyncio.sleep(0.01)
        await rig.publish(second, 2)
        turn = await running
        assert [span.weight_version for span in turn.spans] == [1, 2]
        wanted = chosen(second, PROMPT + turn.ids)[:-1]
        assert np.array_equal(told(turn), wanted)
        assert not np.array_equal(wanted, chosen(first, PROMPT + turn.ids)[:-1])
