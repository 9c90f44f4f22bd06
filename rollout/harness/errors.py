"""Errors of the harness.

Harbor files a failure by the NAME of its exception class, and the worker runs in another
environment than the rest of `rollout`, so these live here and not in `rollout/errors.py`.
Two more classes come from Harbor itself, because its table knows them: `HealthcheckError`
(a dead sandbox) and `RewardFileNotFoundError` (a verifier that left nothing to grade).
"""

from __future__ import annotations


class HarnessError(Exception):
    """Base of the harness's own errors."""


class EngineFailedError(HarnessError):
    """The gateway could not get a turn from any engine within its bounds."""


class EnginesAwayError(EngineFailedError):
    """No gateway could be reached, or each said for all of the call's repeats that it cannot serve:
    this tells of the backend, not of the attempt.
    """


class GatewayRejectedError(HarnessError):
    """The gateway refused a call in a way that is neither a cap nor an outage: our defect."""


class SessionFencedError(HarnessError):
    """The gateway no longer knows the session: the attempt's lease went to someone else."""


class TaskFormatError(HarnessError, ValueError):
    """A task folder cannot be run as it is; the message names the file and the fix."""


class AttemptAbandonedError(HarnessError):
    """The worker gave the attempt up (drain or lost lease) while its agent was running."""


class TransferTooLargeError(HarnessError):
    """Files of a sandbox exceed the configured bound."""
