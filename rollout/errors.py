"""Errors of the rollout package, and the one table that maps them to gRPC status codes.

Owner: rollout. The manager raises these, the server aborts calls with `STATUS_CODES`, and
the client raises the same class again from the code that it received. Nothing ever looks at
a message's text. Which cap was hit travels in the trailing metadata key `CAP_METADATA_KEY`.
"""

from __future__ import annotations

import grpc

CAP_METADATA_KEY = "swe-rl-cap"


class RolloutError(Exception):
    """Base of every error here; on the wire INTERNAL."""


class NotFoundError(RolloutError):
    """An id that the ledger does not know. Not worth a retry."""


class BadRequestError(RolloutError):
    """The request can never succeed as it is."""


class ConflictError(RolloutError):
    """The id exists with other content, or a weight_version was used before."""


class FencedError(RolloutError):
    """The caller no longer owns what it acts for: its lease, window or lineage was replaced."""


class CapExceededError(RolloutError):
    """A named cap was reached; `cap` is the field's name in TokenCaps or in the config."""

    def __init__(self, message: str, cap: str = "") -> None:
        super().__init__(message)
        self.cap = cap


class UnavailableError(RolloutError):
    """No engine serves, or admission is paused. Safe to retry."""


class DeadlineError(RolloutError):
    """The call's deadline passed while it waited. Safe to retry where the RPC is idempotent."""


class CorruptStoreError(RolloutError):
    """A durable record cannot be read back as it was written."""


class UnauthenticatedError(RolloutError):
    """The bearer token is missing or wrong."""


STATUS_CODES: dict[type[RolloutError], grpc.StatusCode] = {
    RolloutError: grpc.StatusCode.INTERNAL,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    BadRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    FencedError: grpc.StatusCode.FAILED_PRECONDITION,
    CapExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    CorruptStoreError: grpc.StatusCode.DATA_LOSS,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
}


def status_code(error: RolloutError) -> grpc.StatusCode:
    """The gRPC code of `error`: that of its nearest class in the table."""
    for cls in type(error).__mro__:
        if cls in STATUS_CODES:
            return STATUS_CODES[cls]
    return grpc.StatusCode.INTERNAL


def error_from_status(code: grpc.StatusCode, message: str, cap: str = "") -> RolloutError:
    """The error of a gRPC `code`; codes outside the table become RolloutError."""
    for cls, known in STATUS_CODES.items():
        if known is code:
            return CapExceededError(message, cap) if cls is CapExceededError else cls(message)
    return RolloutError(f"{code.name}: {message}")
