"""Errors of the weightsync package, and the one table from the core's status codes to them."""

from __future__ import annotations


class WeightSyncError(Exception):
    """Base of every error here."""


class RingArgumentError(WeightSyncError, ValueError):
    """A call that could never succeed as it was made."""


class TransferTimeoutError(WeightSyncError):
    """The other side did not act in time."""


class PeerLostError(WeightSyncError):
    """The other side, or the shared memory between the two, is gone."""


class EpochFencedError(WeightSyncError):
    """The transfer belongs to another window than the receiver expects."""


class CorruptTransferError(WeightSyncError):
    """What arrived is not what was sent: epoch, sequence, size or checksum differ."""


class PlanMismatchError(WeightSyncError):
    """The sender's tensors are not those of the receiver's model."""


class LayoutError(WeightSyncError):
    """An engine's parameters do not lie in memory as this package can map them."""


class ArrivalError(WeightSyncError):
    """An engine's parameters are not, byte for byte, what was sent."""


class PublishError(WeightSyncError):
    """No engine took the new weights."""


CODES: dict[str, type[WeightSyncError]] = {
    "invalid_argument": RingArgumentError,
    "deadline_exceeded": TransferTimeoutError,
    "unavailable": PeerLostError,
    "fenced": EpochFencedError,
    "data_loss": CorruptTransferError,
}


def from_code(code: str, message: str) -> WeightSyncError:
    """The error of a status code of the core."""
    return CODES.get(code, WeightSyncError)(message)
