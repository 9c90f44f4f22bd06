"""Settings of a harness worker and of the agent profiles that it runs.

Owner: `rollout.harness`. Imports pydantic only, because `launch` loads it in another
environment. Every limit of the worker is a field here.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MINI_ACTION_REGEX = r"```mswea_bash_command\s*\n(.*?)\n```"
"""mini-swe-agent's own: the fenced block that its text-based prompt asks for."""


class ProfileConfig(BaseModel):
    """How an agent talks: templates (Jinja), what counts as an action, what an observation shows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    templates: str = "inline"
    """`inline`: the templates below; `mini`: those that mini-swe-agent ships for text-based models."""
    system_template: str = ""
    """Rendered to the system message; empty: the conversation has none."""
    instance_template: str = "{{task}}"
    """Rendered to the first user message; `task` is the task's instruction."""
    observation_template: str = "{{output.output}}"
    """Rendered to the observation; `output` has output, returncode and exception_info."""
    format_error_template: str = "{{error}}"
    """Rendered to the next message when an answer has not exactly one action."""
    action_regex: str = r"\A(.*)\Z"
    """Finds actions in an answer (dot matches newline); its one group is the command, kept as it is."""
    observation_cap_chars: int = Field(default=0, ge=0)
    """Characters kept of an observation after stripping blanks; 0: the template decides."""
    empty_observation: str = ""
    """What stands for an observation that is empty."""
    command_timeout_s: float = Field(default=30.0, gt=0)
    """Wall clock of one command, in seconds."""
    output_cap_bytes: int = Field(default=1 << 20, gt=0)
    """Bytes of a command's output that leave the sandbox, head and tail."""
    loop_limit: int = Field(default=0, ge=0)
    """The attempt ends with cause `loop` at this many identical commands in a row; 0: never."""
    max_format_errors: int = Field(default=3, ge=0)
    """Answers without an action in a row that end the attempt with cause `loop`; 0: never."""
    end_on_length: bool = False
    """True: an answer cut by the token cap ends the attempt with cause `token_cap`."""
    env: dict[str, str] = {}
    """Environment variables of the agent's commands."""

    @field_validator("action_regex")
    @classmethod
    def _one_group(cls, value: str) -> str:
        groups = re.compile(value).groups
        if groups != 1:
            raise ValueError(
                f"action_regex {value!r} has {groups} groups: want exactly one, the command"
            )
        return value

    @field_validator("templates")
    @classmethod
    def _known_templates(cls, value: str) -> str:
        if value not in ("inline", "mini"):
            raise ValueError(f"templates={value!r}: want inline or mini")
        return value


TOY_PROFILE = ProfileConfig(
    observation_cap_chars=60,
    empty_observation="ok",
    command_timeout_s=10.0,
    output_cap_bytes=4096,
    loop_limit=0,
    end_on_length=True,
)
"""The whole answer is the command; an observation is the first 60 characters of output, or `ok`."""

MINI_PROFILE = ProfileConfig(
    templates="mini",
    action_regex=MINI_ACTION_REGEX,
    loop_limit=12,
    env={
        "PAGER": "cat",
        "MANPAGER": "cat",
        "LESS": "-R",
        "PIP_PROGRESS_BAR": "off",
        "TQDM_DISABLE": "1",
    },
)
"""mini-swe-agent's own text-based prompt and bash-block format."""


class SandboxUse(BaseModel):
    """How the harness uses sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttl_s: float = Field(default=60.0, gt=0)
    """Lease time asked of the broker; renewed every third of it while the trial runs."""
    acquire_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for a sandbox, the broker's queue included."""
    transfer_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one upload, download or collection."""
    control_timeout_s: float = Field(default=20.0, gt=0)
    """Deadline of the short calls (renew, release, kill)."""
    exec_slack_s: float = Field(default=15.0, gt=0)
    """Added to a command's own timeout to give the RPC's deadline; past it the sandbox counts as dead."""
    default_image: str = "toy"
    """Image for tasks whose task.toml names no docker_image."""
    default_workdir: str = "/app"
    """Workdir for tasks that name none."""
    max_change_bytes: int = Field(default=64 << 20, gt=0)
    """Most bytes of the agent's changes that are carried to the grading sandbox."""
    upload_cache_bytes: int = Field(default=256 << 20, ge=0)
    """Memory for packed task folders, least recently used dropped."""


class GradingConfig(BaseModel):
    """How attempts are graded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grade_capped: bool = True
    """Run the verifier after a cap ended the attempt too; False: such an attempt is scored 0."""
    test_timeout_s: float | None = Field(default=None, gt=0)
    """Bound on one run of test.sh; None: the task's own [verifier].timeout_sec."""
    reruns: int = Field(default=1, ge=1)
    """Fresh sandboxes that tests get again after they hung, died or left nothing to grade."""
    reuse_verdicts: int = Field(default=0, ge=0)
    """Verdicts kept a task: an attempt whose changes equal those of one that was graded before gets
    its verdict, and no sandbox of its own. 0: each attempt is graded; right wherever the tests may
    depend on chance or time."""
    gold_control: bool = True
    """Beside a rerun, grade the task's solution: only if it passes is the failure the patch's doing."""
    output_cap_bytes: int = Field(default=1 << 20, gt=0)
    """Bytes kept of test.sh's stdout and of stderr."""
    max_log_bytes: int = Field(default=32 << 20, gt=0)
    """Largest verifier log that is downloaded."""


class HarnessConfig(BaseModel):
    """Everything that one worker process needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manager_address: str
    """HOST:PORT of the RolloutManager."""
    broker_address: str
    """HOST:PORT of the SandboxBroker."""
    gateway_urls: list[str] = Field(min_length=1)
    """Base URLs of the gateways, such as http://127.0.0.1:8100."""
    trials_dir: Path
    """Folder for Harbor's trial folders; fast storage (they are small and short-lived)."""
    trajectories_dir: Path | None = None
    """Each attempt's messages are written here as ATIF JSON; None: not written."""
    keep_trials: bool = False
    """Keep Harbor's trial folders after the attempt, for debugging."""

    concurrency: int = Field(default=16, ge=1)
    """Attempts that run at a time in this worker."""
    lease_wait_s: float = Field(default=20.0, gt=0)
    """Deadline of one LeaseAttempts call, which blocks at the manager."""
    renew_interval_s: float = Field(default=5.0, gt=0)
    """Time between renewals of attempt leases; below a third of the manager's lease time."""
    rpc_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of the manager's other calls."""
    finish_retry_s: float = Field(default=120.0, gt=0)
    """How long a finished attempt is offered to a manager that does not answer, then dropped."""
    backoff_max_s: float = Field(default=5.0, gt=0)
    """Longest pause between tries while the manager does not answer; doubles from 0.1 s."""
    drain_timeout_s: float = Field(default=20.0, gt=0)
    """On SIGTERM: time for abandoning trials and reporting them as interrupted."""

    model_name: str = "policy"
    """`model` in requests to the gateway."""
    model_call_timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of one model call, the scheduler's queue and update windows included."""
    model_retries: int = Field(default=6, ge=0)
    """Repeats of one model call after 503 or a connection error. Safe: turns are durable, so a
    repeat is answered from history or sampled anew, never recorded twice."""
    model_retry_max_s: float = Field(default=4.0, gt=0)
    """Longest pause between these repeats; doubles from 0.1 s."""
    attempt_wall_s: float = Field(default=7200.0, gt=0)
    """Wall clock of an attempt's agent phase, queues included: a safety net above the time budget."""
    max_turns_slack: int = Field(default=4, ge=0)
    """The agent stops by itself this many calls above the attempt's max_turns, should a gateway not."""

    profiles: dict[str, ProfileConfig] = {"toy": TOY_PROFILE, "mini": MINI_PROFILE}
    """Agent profiles by name; a task picks one in task.toml, [metadata] profile."""
    default_profile: str = "toy"
    """Profile of tasks that pick none."""
    sandbox: SandboxUse = SandboxUse()
    """Use of sandboxes."""
    grading: GradingConfig = GradingConfig()
    """Grading."""

    @model_validator(mode="after")
    def _default_profile_exists(self) -> HarnessConfig:
        if self.default_profile not in self.profiles:
            raise ValueError(
                f"default_profile {self.default_profile!r} is not among the profiles "
                f"{sorted(self.profiles)}: add it or name one of them"
            )
        return self

    @field_validator("gateway_urls")
    @classmethod
    def _plain_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"gateway url {url!r}: want http://HOST:PORT")
        return [url.rstrip("/") for url in urls]
