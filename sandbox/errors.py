"""Typed errors of the sandbox package and their gRPC statuses: one table, both ways.

A server sends the class name in trailing metadata (`ERROR_METADATA_KEY`), so that a client
tells classes with one status apart without reading messages.
"""

from __future__ import annotations

from typing import ClassVar

import grpc

ERROR_METADATA_KEY = "swe-rl-error"
MAX_ACQUIRE_ARCHIVE_BYTES = 262_144
"""Of the archive that may come with Acquire, as the contract says; larger ones take Upload."""


class SandboxError(Exception):
    """Base of every error of this package; `status` is what a client sees."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL


class UnknownLeaseError(SandboxError):
    """The lease never existed, was released, or expired and was reaped."""

    status = grpc.StatusCode.NOT_FOUND


class StaleEpochError(SandboxError):
    """The lease lives, under another epoch: the caller no longer owns it."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class BrokerAwayError(SandboxError):
    """The broker cannot be reached, or went away during the call (client side only): its servers
    name their errors, so a bare UNAVAILABLE comes from the transport.
    """

    status = grpc.StatusCode.UNAVAILABLE


class SandboxDiedError(SandboxError):
    """The sandbox or its backend died; safe to retry with a new lease."""

    status = grpc.StatusCode.UNAVAILABLE


class BackendBusyError(SandboxError):
    """The backend refuses starts for now (429, 503, no memory); retried by the broker."""

    status = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CapacityError(SandboxError):
    """No room for another sandbox within the caller's deadline."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class TooLargeError(SandboxError):
    """A transfer passes its byte limit."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class InvalidRequestError(SandboxError):
    """The request cannot be served as it stands; retrying it is useless."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineError(SandboxError):
    """The call's own deadline passed before the broker answered (client side only)."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class BackendSetupError(SandboxError, ValueError):
    """The backend cannot run on this host as configured; the message says what to change."""

    status = grpc.StatusCode.FAILED_PRECONDITION


ERRORS: tuple[type[SandboxError], ...] = (
    UnknownLeaseError,
    StaleEpochError,
    BrokerAwayError,
    SandboxDiedError,
    BackendBusyError,
    CapacityError,
    TooLargeError,
    InvalidRequestError,
    DeadlineError,
    BackendSetupError,
)


def error_class(status: grpc.StatusCode, name: str = "") -> type[SandboxError]:
    """The class for a status, narrowed by the name from trailing metadata when it is known."""
    matching = [error for error in ERRORS if error.status is status]
    for error in matching:
        if error.__name__ == name:
            return error
    return matching[0] if matching else SandboxError
