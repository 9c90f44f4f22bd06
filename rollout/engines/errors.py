"""Errors of calls to inference engines. Owner: rollout/engines."""

from __future__ import annotations

from rollout.errors import RolloutError


class EngineError(RolloutError):
    """A call to an engine failed; `engine` and `call` say which."""

    def __init__(self, engine: str, call: str, reason: str) -> None:
        super().__init__(f"engine {engine}: {call}: {reason}")
        self.engine = engine
        self.call = call


class EngineUnreachableError(EngineError):
    """No connection, or it broke: the server starts, ends or is dead."""


class EngineTimeoutError(EngineError):
    """No answer within the deadline; whether the call took effect is unknown."""


class EngineRefusedError(EngineError):
    """The server answered with a status other than 200, kept in `status`."""

    def __init__(self, engine: str, call: str, status: int, text: str) -> None:
        super().__init__(engine, call, f"got status {status}, wanted 200: {text[:500]}")
        self.status = status
