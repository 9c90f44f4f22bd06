"""A Harbor trial without the work that Harbor repeats for every trial of one task.

Owner: the attempt's runner. Agent, environment and verifier are made by Harbor itself from
import paths; this subclass (Harbor is pinned to 0.25) keeps the task's lock file instead of
hashing the task folder anew, and collects no artifacts, which nothing here reads: the
verifier takes what it grades from the sandbox, and the messages are in the agent.
"""

from __future__ import annotations

from pathlib import Path

from harbor.models.job.lock import TrialLock
from harbor.models.trial.config import (
    AgentConfig,
    EnvironmentConfig,
    TaskConfig,
    TrialConfig,
    VerifierConfig,
)
from harbor.trial.single_step import SingleStepTrial

from rollout.harness.config import HarnessConfig
from rollout.harness.task_folder import TaskFolder

_AGENT = "rollout.harness.agent:MiniAgent"
_ENVIRONMENT = "rollout.harness.environment:BrokerEnvironment"
_VERIFIER = "rollout.harness.verifier:FreshSandboxVerifier"
_UNBOUNDED_S = 86_400.0
BUILT_IN_AGENTS = frozenset({"oracle", "nop"})


def trial_config(config: HarnessConfig, folder: TaskFolder, agent: str, name: str) -> TrialConfig:
    """Harbor's configuration for one attempt.

    The verifier bounds each of its steps itself, with room for a rerun and a control, so
    Harbor's clock over all of it is only a net.
    """
    built_in = agent in BUILT_IN_AGENTS
    return TrialConfig(
        task=TaskConfig(path=folder.path),
        trial_name=name,
        trials_dir=config.trials_dir,
        agent=AgentConfig(
            name=agent if built_in else None,
            import_path=None if built_in else _AGENT,
            override_timeout_sec=None if built_in else config.attempt_wall_s,
        ),
        environment=EnvironmentConfig(import_path=_ENVIRONMENT),
        verifier=VerifierConfig(import_path=_VERIFIER, override_timeout_sec=_UNBOUNDED_S),
        environment_build_timeout_multiplier=max(
            1.0,
            (config.sandbox.acquire_timeout_s + config.sandbox.transfer_timeout_s)
            / folder.task.config.environment.build_timeout_sec,
        ),
    )


class LeanTrial(SingleStepTrial):
    """One attempt as Harbor sees it."""

    def __init__(self, config: TrialConfig, folder: TaskFolder) -> None:
        self._folder = folder
        super().__init__(config, _task=folder.task, _task_download_result=folder.download_result)

    def _write_trial_lock(self) -> TrialLock:
        key = self.config.agent.name or self.config.agent.import_path or ""
        lock = self._folder.locks.get(key)
        if lock is None:
            lock = self._folder.locks[key] = super()._write_trial_lock()
        return lock

    def _prepare_artifact_mount_dirs(self) -> None:
        """No artifacts, so no folders for them."""

    async def _collect_artifacts(self, *, stop_main_before_sidecars: bool = False) -> None:
        """Nothing reads artifacts here."""

    @property
    def trial_dir(self) -> Path:
        """Harbor's folder of this trial."""
        return self.paths.trial_dir
