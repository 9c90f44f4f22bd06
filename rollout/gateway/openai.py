"""OpenAI's chat completions: what a request may say, and the shapes of answers and errors.

Owner: the gateway. Pure. Sampling belongs to the session: a client's temperature and seed
are ignored. Whatever would make the engine's log-probs another distribution's, or asks for
what a turn cannot give, is refused by name.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.gateway.history import Message
from rollout.gateway.refusal import Reason, Refusal
from rollout.gateway.turn_runner import Answer

DECODE_HEADER = "x-swe-rl-decode-ms"
"""Milliseconds inside the engine, its own queue left out."""


class _ErrorShape(NamedTuple):
    status: int
    type: str
    code: str


# `code` is the contract: clients decide by it, never by the message.
ERRORS: dict[Reason, _ErrorShape] = {
    Reason.UNKNOWN_KEY: _ErrorShape(401, "invalid_request_error", "invalid_api_key"),
    Reason.FENCED: _ErrorShape(409, "invalid_request_error", "session_fenced"),
    Reason.BAD_REQUEST: _ErrorShape(400, "invalid_request_error", "invalid_value"),
    Reason.UNSUPPORTED: _ErrorShape(400, "invalid_request_error", "unsupported_parameter"),
    Reason.TOO_LARGE: _ErrorShape(413, "invalid_request_error", "request_too_large"),
    Reason.TURN_CAP: _ErrorShape(400, "invalid_request_error", "turn_limit_exceeded"),
    Reason.TOKEN_CAP: _ErrorShape(400, "invalid_request_error", "context_length_exceeded"),
    Reason.ENGINE_FAILED: _ErrorShape(503, "server_error", "engine_failed"),
    Reason.ENGINE_REFUSED: _ErrorShape(500, "server_error", "engine_refused"),
    Reason.NO_ENGINE: _ErrorShape(503, "server_error", "no_engine"),
    Reason.MANAGER_UNAVAILABLE: _ErrorShape(503, "server_error", "manager_unavailable"),
    Reason.SESSION_MOVED: _ErrorShape(503, "server_error", "session_moved"),
    Reason.DRAINING: _ErrorShape(503, "server_error", "draining"),
}


class TextPart(BaseModel):
    """A text part of a message's content."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; agents add keys of their own, which are not rendered."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None

    def reduced(self) -> Message:
        """Role and text."""
        if isinstance(self.content, list):
            return Message(self.role, "".join(part.text for part in self.content))
        return Message(self.role, self.content or "")


class ChatRequest(BaseModel):
    """POST /v1/chat/completions. Unknown arguments are refused, as OpenAI does."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    # Accepted and without effect: the session decides, or nothing is stored.
    temperature: float | None = None
    seed: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    # Accepted at the value that changes nothing.
    n: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """The client's own limit on sampled tokens."""
        limits = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        return min(limits, default=None)

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def refuse_unsupported(self) -> None:
        """Raises Refusal for the first argument that asks for what a session does not give."""
        neutral: dict[str, tuple[Any, ...]] = {
            "n": (1,),
            "top_p": (1.0,),
            "top_k": (-1, 0),
            "min_p": (0.0,),
            "presence_penalty": (0.0,),
            "frequency_penalty": (0.0,),
            "repetition_penalty": (1.0,),
            "logit_bias": ({},),
            "logprobs": (False,),
            "top_logprobs": (0,),
            "stop": ("", []),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "response_format": ({"type": "text"},),
        }
        for name, values in neutral.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise Refusal(
                    Reason.UNSUPPORTED,
                    f"Unsupported value: '{name}' does not support {value!r} here. Only "
                    f"{' or '.join(map(repr, values))} is supported: the session's sampling is "
                    "fixed, so that its log-probs are those of the whole distribution.",
                    name,
                )
        for i, message in enumerate(self.messages):
            if message.tool_calls:
                raise Refusal(
                    Reason.UNSUPPORTED,
                    "Unsupported value: assistant messages with tool_calls are not rendered yet.",
                    f"messages[{i}].tool_calls",
                )


def parse_request(body: bytes) -> ChatRequest:
    """The request of a JSON body. Raises Refusal that names the field at fault."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden":
            message = f"Unrecognized request argument supplied: {param}"
        else:
            message = f"Invalid value for '{param or 'body'}': {first['msg']}"
        raise Refusal(Reason.BAD_REQUEST, message, param) from error
    request.refuse_unsupported()
    return request


def error_body(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error object."""
    shape = ERRORS[refusal.reason]
    return {
        "error": {
            "message": str(refusal),
            "type": shape.type,
            "param": refusal.param,
            "code": shape.code,
        }
    }


def completion_body(
    answer: Answer, request: ChatRequest, call_id: str, created: int
) -> dict[str, Any]:
    """The `chat.completion` object."""
    return {
        "id": call_id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": None,
                "finish_reason": answer.finish_reason,
            }
        ],
        "usage": _usage(answer),
    }


def stream_events(answer: Answer, request: ChatRequest, call_id: str, created: int) -> list[bytes]:
    """The server-sent events of a finished turn, the last `[DONE]`."""

    def chunk(**fields: Any) -> bytes:
        head = {
            "id": call_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        return sse({**head, **fields})

    def choice(delta: dict[str, Any], finish: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]

    events = [
        chunk(choices=choice({"role": "assistant", "content": answer.text}, None)),
        chunk(choices=choice({}, answer.finish_reason)),
    ]
    if request.include_usage:
        events.append(chunk(choices=[], usage=_usage(answer)))
    return [*events, b"data: [DONE]\n\n"]


def sse(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


PING = b": ping\n\n"
"""A comment that keeps a waiting stream alive."""


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
