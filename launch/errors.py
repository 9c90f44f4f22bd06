"""What can go wrong in `launch`, each with the exit code of the command."""

from __future__ import annotations


class LaunchError(Exception):
    """Shown as one line, without a traceback; the command exits with `exit_code`."""

    exit_code = 1


class UsageError(LaunchError):
    """The command, a recipe or a path is wrong; nothing was started."""

    exit_code = 2


class ProcessFailed(LaunchError):
    """A process of the run did not start, or died more often than its policy allows."""

    exit_code = 3


class JobFailed(LaunchError):
    """Every process lives, but a stage of the job reported a failure."""

    exit_code = 4


class RunPaused(JobFailed):
    """A run that paused itself was let go on by nobody; it ended, resumable."""

    exit_code = 3


class ReplayDiffers(LaunchError):
    """A replay of a run with the run's own settings did not give the run's numbers."""

    exit_code = 5
