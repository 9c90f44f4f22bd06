"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollout.gateway.chat_template import ChatTemplate
from rollout.gateway.tiny_tokenizer import THINKING, TINY, write_model
from rollout.gateway.world import World, open_world


@pytest.fixture(scope="session", params=[TINY, THINKING], ids=["tiny", "thinking"])
def any_chat(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ChatTemplate:
    """Both kinds of template."""
    return ChatTemplate.load(write_model(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(write_model(tmp_path_factory.mktemp("model"), TINY))


@pytest.fixture
async def world(tiny: ChatTemplate) -> AsyncIterator[World]:
    async with open_world(tiny) as opened:
        yield opened
