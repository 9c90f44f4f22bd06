"""Errors of the trainer. Messages say what was got, what was wanted and what to do."""

from __future__ import annotations

import grpc


class TrainerError(Exception):
    """Any failure that the trainer names."""


class BadSequenceError(TrainerError):
    """A training record breaks the contract of trajectory.proto."""


class NonFiniteError(TrainerError):
    """The model produced NaN or infinity on a trained token; the step was not taken."""


class GuardError(TrainerError):
    """A guard tripped and its action is to stop; a checkpoint of the moment was saved."""


class CorruptCheckpointError(TrainerError):
    """A checkpoint's files do not match its manifest."""


class CheckpointWriteError(TrainerError):
    """A checkpoint could not be written; nothing of it is left, and those before it are whole."""


class RankFailedError(TrainerError):
    """Another rank of the trainer could not do its part; none did."""


class LeaderLostError(TrainerError):
    """The trainer's first rank is gone, and with it what this one was there for."""


class StageConflictError(TrainerError):
    """A stage was asked for while another runs, or cannot run in this state."""


class BadRequestError(TrainerError):
    """A request that can never succeed as it is."""


class PublishFailedError(TrainerError):
    """Weights reached no engine, or the window could not be opened. Safe to try a new version."""


class StoppedError(TrainerError):
    """The trainer is stopping; the work in hand was given up."""


class EvaluationFailedError(TrainerError):
    """An evaluation during RL gave no result; the stage goes on without it."""


class EvaluationLostError(EvaluationFailedError):
    """The engines that served its weight_version are gone; another can be started."""


STATUS_CODES: dict[type[TrainerError], grpc.StatusCode] = {
    TrainerError: grpc.StatusCode.INTERNAL,
    BadSequenceError: grpc.StatusCode.DATA_LOSS,
    NonFiniteError: grpc.StatusCode.INTERNAL,
    GuardError: grpc.StatusCode.INTERNAL,
    CorruptCheckpointError: grpc.StatusCode.DATA_LOSS,
    CheckpointWriteError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RankFailedError: grpc.StatusCode.INTERNAL,
    LeaderLostError: grpc.StatusCode.INTERNAL,
    StageConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    BadRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    PublishFailedError: grpc.StatusCode.UNAVAILABLE,
    EvaluationFailedError: grpc.StatusCode.DEADLINE_EXCEEDED,
    EvaluationLostError: grpc.StatusCode.ABORTED,
    StoppedError: grpc.StatusCode.UNAVAILABLE,
}
"""The one table between our errors and gRPC's codes."""
