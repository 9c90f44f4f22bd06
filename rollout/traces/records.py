"""TokenSequence records of SFT and pre-training text.

Owner: rollout/traces. The trainer reads ids and masks only, so everything that renders or
tokenises ends here. A row's task_id says where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proto import trajectory_pb2
from rollout.gateway.chat_template import ChatTemplate


class RowTooLong(ValueError):
    """A conversation renders to more ids than asked for."""


def training_record(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    row_id: str,
    task_id: str,
    tools: Sequence[Mapping[str, Any]] = (),
    max_tokens: int | None = None,
) -> trajectory_pb2.TokenSequence:
    """The record of a finished conversation; loss_mask 1 on what the assistant wrote.

    `tools` are what the conversation's row declared, in OpenAI's form.

    Raises RowTooLong past `max_tokens` ids, ValueError when no id would be trained.
    """
    ids, mask = template.render_training(messages, tools)
    if max_tokens is not None and len(ids) > max_tokens:
        raise RowTooLong(f"row {row_id} has {len(ids)} ids; at most {max_tokens} are wanted")
    if not any(mask):
        raise ValueError(f"row {row_id} has no assistant message to train on")
    return trajectory_pb2.TokenSequence(
        attempt_id=row_id,
        task_id=task_id,
        token_ids=b"".join(i.to_bytes(4, "little", signed=True) for i in ids),
        loss_mask=bytes(mask),
    )
