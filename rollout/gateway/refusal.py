"""Why a model call gets no turn. Dialects turn a refusal into their own error shape."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Named causes of a refusal; also the labels of its counter."""

    UNKNOWN_KEY = "unknown_key"
    FENCED = "fenced"
    BAD_REQUEST = "bad_request"
    UNSUPPORTED = "unsupported"
    TOO_LARGE = "too_large"
    TURN_CAP = "turn_cap"
    TOKEN_CAP = "token_cap"
    ENGINE_FAILED = "engine_failed"
    ENGINE_REFUSED = "engine_refused"
    NO_ENGINE = "no_engine"
    MANAGER_UNAVAILABLE = "manager_unavailable"
    SESSION_MOVED = "session_moved"
    DRAINING = "draining"


class Refusal(Exception):
    """The call ends without an answer; `param` names the request's field at fault, if one is."""

    def __init__(self, reason: Reason, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.param = param


def turn_cap(max_turns: int) -> Refusal:
    """The attempt used its model calls."""
    return Refusal(
        Reason.TURN_CAP, f"This session's limit of {max_turns} model calls is reached.", "messages"
    )


def token_cap(max_total_tokens: int, num_prompt: int) -> Refusal:
    """The trajectory has no room for one more id; OpenAI's own words."""
    return Refusal(
        Reason.TOKEN_CAP,
        f"This model's maximum context length is {max_total_tokens} tokens. However, your "
        f"messages resulted in {num_prompt} tokens. Please reduce the length of the messages.",
        "messages",
    )
