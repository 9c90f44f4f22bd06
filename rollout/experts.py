"""Experts that engines chose: their layout, and how turns' choices make up a sequence's. Pure.

Each turn is recorded with the choices at the tokens that it added: from the last one of the kept
history, which nothing had been predicted by before, to the last but one of the turn. So a choice is
that of the engine call that sampled the token or first read it as a prompt; where a weight update
made the engine read a running turn's tokens again, it is that of the later version. Choices at
tokens from the prefix cache are those of the call that put them there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from proto import trajectory_pb2 as tpb
from rollout.errors import BadRequestError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_layout(model_path: Path) -> tpb.ExpertLayout:
    """The layout of the model in a Hugging Face folder, as SGLang returns its choices.

    Raises:
        BadRequestError: its config.json cannot be read, or names no experts.
    """
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text())
        (num_experts,) = {int(config[name]) for name in _NUM_EXPERTS if config.get(name)}
        return tpb.ExpertLayout(
            num_layers=int(config["num_hidden_layers"]),
            top_k=int(config["num_experts_per_tok"]),
            num_experts=num_experts,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequestError(
            f"engines.routed_experts is on, but {path} tells of no experts "
            f"({type(error).__name__}: {error}); turn it off"
        ) from error


def id_type(layout: tpb.ExpertLayout) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """uint8 up to 256 experts, else little-endian uint16."""
    return np.dtype(np.uint8) if layout.num_experts <= 256 else np.dtype("<u2")


def bytes_per_token(layout: tpb.ExpertLayout) -> int:
    """Of RoutedExperts.ids."""
    return layout.num_layers * layout.top_k * id_type(layout).itemsize


def first_routed(history_length: int) -> int:
    """Position of the first token whose choice is recorded with a turn."""
    return max(history_length - 1, 0)


def num_routed(history_length: int, total_length: int) -> int:
    """Tokens whose choices are recorded with a turn that ends at `total_length`."""
    return max(total_length - 1 - first_routed(history_length), 0)


def check_experts(turn: tpb.TurnRecord, total_length: int, experts: bytes) -> None:
    """Raises BadRequestError unless `experts` are what the turn says that they are."""
    wanted = turn.num_routed_tokens * bytes_per_token(turn.expert_layout)
    tokens = num_routed(turn.history_length, total_length)
    if len(experts) != wanted or turn.num_routed_tokens not in (0, tokens):
        raise BadRequestError(
            f"turn {turn.turn_index} of attempt {turn.attempt_id} has {len(experts)} B of experts "
            f"for {turn.num_routed_tokens} tokens; want {wanted} B, and {tokens} tokens or none"
        )


def chain_experts(
    turns: Sequence[tpb.TurnRecord],
    tip: int,
    total_length: int,
    experts_of: Callable[[tpb.TurnRecord], bytes],
) -> tpb.RoutedExperts | None:
    """Choices at all tokens but the last of the chain that ends in turn `tip`.

    Args:
        total_length: ids of the chain.
        experts_of: reads what was recorded with a turn.

    Returns:
        None where a turn of the chain has none, or where they are laid out unlike.
    """
    chain = [turns[tip]]
    while chain[-1].parent_turn_index >= 0:
        chain.append(turns[chain[-1].parent_turn_index])
    layout = chain[0].expert_layout
    if any(t.expert_layout != layout or not t.num_routed_tokens for t in chain):
        return None
    width = bytes_per_token(layout)
    ids: npt.NDArray[np.uint8] = np.zeros((total_length - 1) * width, np.uint8)
    for turn in reversed(chain):  # a branch writes over what it cut off
        place = ids[first_routed(turn.history_length) * width :]
        recorded = np.frombuffer(experts_of(turn), np.uint8)[: len(place)]
        place[: len(recorded)] = recorded
    return tpb.RoutedExperts(layout=layout, ids=ids.tobytes())
