"""Turns to TurnRecord messages and back. Pure; the other half of the sampled-token contract."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from proto import trajectory_pb2 as tpb
from rollout.experts import bytes_per_token
from rollout.gateway.engine_client import Generation
from rollout.gateway.history import History, Message, Plan

assert array("i").itemsize == 4 and array("f").itemsize == 4, "int32 and float32 arrays"

_FINISH = {
    "stop": tpb.FINISH_REASON_STOP,
    "length": tpb.FINISH_REASON_LENGTH,
    "abort": tpb.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a turn's time went, in seconds; `received_at_s` is Unix time."""

    received_at_s: float
    queued_s: float
    generating_s: float
    engine_queued_s: float = 0.0  # part of generating_s


def to_record(
    *,
    attempt_id: str,
    turn_index: int,
    plan: Plan,
    history_length: int,
    prompt_ids: Sequence[int],
    generation: Generation,
    answer: Message,
    sampling: tpb.SamplingParams,
    kv_version_lower_bound: int,
    engine: str,
    timing: Timing,
    expert_layout: tpb.ExpertLayout | None = None,
) -> tpb.TurnRecord:
    """The durable form of a turn. `history_length` is the parent chain's whole length.

    Args: expert_layout is that of generation.experts, which travel beside the record.
    """
    record = tpb.TurnRecord(
        attempt_id=attempt_id,
        turn_index=turn_index,
        parent_turn_index=plan.parent,
        history_length=history_length,
        prompt_ids=_pack("i", prompt_ids),
        sampled_ids=_pack("i", generation.ids),
        rollout_logprobs=_pack("f", generation.logprobs),
        version_spans=[
            tpb.VersionSpan(weight_version=s.weight_version, start=s.start, end=s.end)
            for s in generation.spans
        ],
        kv_version_lower_bound=kv_version_lower_bound,
        sampling=sampling,
        finish_reason=_FINISH[generation.finish],
        kind=tpb.TURN_KIND_AGENT,
        engine=engine,
        new_messages_json=_json([m._asdict() for m in plan.new_messages]),
        assistant_message_json=_json(answer._asdict()),
        cached_tokens=generation.cached_tokens,
    )
    if expert_layout is not None and generation.experts:
        record.expert_layout.CopyFrom(expert_layout)
        record.num_routed_tokens = len(generation.experts) // bytes_per_token(expert_layout)
    record.timings.received_at.FromNanoseconds(int(timing.received_at_s * 1e9))
    record.timings.queued.FromNanoseconds(int(timing.queued_s * 1e9))
    record.timings.generating.FromNanoseconds(int(timing.generating_s * 1e9))
    record.timings.engine_queued.FromNanoseconds(int(timing.engine_queued_s * 1e9))
    if generation.first_token_at_s:
        record.timings.first_token_at.FromNanoseconds(int(generation.first_token_at_s * 1e9))
    return record


def history_of(records: Sequence[tpb.TurnRecord]) -> History:
    """The history that durable turns, in order, stand for."""
    history = History()
    for record in records:
        if record.parent_turn_index >= 0:
            whole = history.length(record.parent_turn_index)
            if record.history_length != whole:
                raise ValueError(
                    f"turn {record.turn_index} of attempt {record.attempt_id} keeps "
                    f"{record.history_length} of {whole} ids of its parent; this gateway "
                    "extends whole turns only"
                )
        new = [Message(m["role"], m["content"]) for m in json.loads(record.new_messages_json)]
        said = json.loads(record.assistant_message_json)
        history.add(
            record.parent_turn_index,
            new,
            Message(said["role"], said["content"]),
            unpack_ids(record.prompt_ids),
            unpack_ids(record.sampled_ids),
            cut=record.finish_reason != tpb.FINISH_REASON_STOP,
        )
    return history


def _json(value: object) -> bytes:
    # A lone surrogate is legal JSON and no UTF-8: escapes carry it.
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def _pack(typecode: str, values: Sequence[float]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """int32[] of the contracts as an array."""
    values: array[int] = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
