"""The agent: mini-swe-agent's DefaultAgent as a library, outside the sandbox.

Owner: one trial. Harbor builds `MiniAgent` by import path; `bind` hands over the live
objects. The agent's loop runs in a thread of the worker's pool:

    thread:  DefaultAgent.run -> GatewayModel.query -> LoopBridge -> gateway (HTTP)
                              -> SandboxCommands.execute -> LoopBridge -> broker (gRPC)

Invariants: commands run exactly as sampled, without filter or rewriting; a failure of engine
or sandbox ends the run as an exception and never becomes an observation; every end that is
the policy's doing is an `AgentEnd` in the attempt's record.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from minisweagent import __version__ as mini_version
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import FormatError, InterruptAgentFlow, Submitted

from rollout.harness.attempt_record import AttemptRecord
from rollout.harness.causes import AgentEnd
from rollout.harness.config import HarnessConfig
from rollout.harness.environment import BrokerEnvironment
from rollout.harness.errors import TaskFormatError
from rollout.harness.gateway_client import CapReachedError, GatewayClient
from rollout.harness.loop_bridge import LoopBridge
from rollout.harness.profile import Profile, compiled

SUBMIT_LINE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_MINI_ENDS = {
    "Submitted": AgentEnd.SUBMITTED,
    "LimitsExceeded": AgentEnd.TURN_CAP,
    "RepeatedFormatError": AgentEnd.LOOP,
}


def ended(end: AgentEnd, detail: str) -> InterruptAgentFlow:
    """The exception that makes mini's loop stop with `end` as its exit status."""
    return InterruptAgentFlow(
        {"role": "exit", "content": detail, "extra": {"exit_status": end.value, "submission": ""}}
    )


class GatewayModel:
    """mini's model protocol on the gateway."""

    def __init__(
        self, gateway: GatewayClient, bridge: LoopBridge, record: AttemptRecord, profile: Profile
    ) -> None:
        self._gateway, self._bridge = gateway, bridge
        self._record, self._profile = record, profile
        self.config = profile.config

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """The next assistant message with its one action. Raises what ends the attempt."""
        record = self._record
        if record.time_budget_s is not None and record.spent_s() >= record.time_budget_s:
            raise ended(AgentEnd.TIME_BUDGET, f"{record.spent_s():.1f} s of decoding and tools")
        sent = [
            {"role": message["role"], "content": message["content"]}
            for message in messages
            if message["content"] or message["role"] != "system"
        ]
        started = time.monotonic()
        try:
            answer = self._bridge.call(
                self._gateway.complete(record.attempt_id, record.session_key, sent)
            )
        except CapReachedError as error:
            raise ended(error.end, str(error)) from error
        finally:
            record.model_s += time.monotonic() - started
        record.num_model_calls += 1
        record.decode_s += answer.decode_s
        message = {"role": "assistant", "content": answer.content}
        extra: dict[str, Any] = {"cost": 0.0, "finish_reason": answer.finish_reason}
        if answer.finish_reason == "length" and self._profile.config.end_on_length:
            raise InterruptAgentFlow(
                {**message, "extra": extra},
                *ended(AgentEnd.TOKEN_CAP, "an answer reached the cap on one turn").messages,
            )
        actions = self._profile.actions(answer.content)
        if len(actions) != 1:
            # Unlike mini's own models, the answer stays in the history: what was sampled is
            # then extended by the next prompt, and may be trained.
            content = self._profile.format_error(actions, answer.finish_reason)
            raise FormatError({**message, "extra": extra}, {"role": "user", "content": content})
        return {**message, "extra": {**extra, "actions": [{"command": actions[0]}]}}

    def format_message(self, **kwargs: Any) -> dict[str, Any]:
        """mini's way to make a message."""
        return kwargs

    def format_observation_messages(
        self,
        message: dict[str, Any],
        outputs: list[dict[str, Any]],
        template_vars: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """One user message for each command's output."""
        return [
            {
                "role": "user",
                "content": self._profile.observation(output),
                "extra": {"returncode": output["returncode"], **output["extra"]},
            }
            for output in outputs
        ]

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """The model adds no variables."""
        return {}

    def serialize(self) -> dict[str, Any]:
        """Nothing is kept in mini's own format."""
        return {}


class SandboxCommands:
    """mini's environment protocol on the trial's sandbox."""

    def __init__(
        self,
        environment: BrokerEnvironment,
        bridge: LoopBridge,
        record: AttemptRecord,
        profile: Profile,
    ) -> None:
        self._environment, self._bridge = environment, bridge
        self._record, self._profile = record, profile
        self.config = profile.config
        self._last_command, self._num_repeats = "", 0

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Runs the action's command. Raises Submitted, what ends the attempt, HealthcheckError."""
        command = action["command"]
        self._check_loop(command)
        record, settings = self._record, self._profile.config
        timeout_s = settings.command_timeout_s
        left_s = None
        if record.time_budget_s is not None:
            left_s = max(0.1, record.time_budget_s - record.spent_s())
            timeout_s = min(timeout_s, left_s)
        started = time.monotonic()
        try:
            reply = self._bridge.call(
                self._environment.run(
                    command,
                    timeout_s=timeout_s,
                    output_cap_bytes=settings.output_cap_bytes,
                    env=settings.env or None,
                    cwd=cwd or None,
                    merge_output=True,
                )
            )
        except (TaskFormatError, UnicodeEncodeError) as error:
            # The broker refuses the command itself (a NUL, more than the kernel takes): what a
            # shell would answer.
            return {
                "output": "cannot execute: argument list too long or invalid\n",
                "returncode": 126,
                "exception_info": "",
                "extra": {"refused": str(error)[:200]},
            }
        finally:
            record.tool_s += time.monotonic() - started
        record.agent_oom = reply.oom_killed
        if reply.timed_out and left_s is not None and timeout_s >= left_s:
            raise ended(AgentEnd.TIME_BUDGET, "the budget ran out inside a command")
        output = {
            "output": _text(reply.stdout, reply.stdout_dropped_bytes),
            "returncode": -1 if reply.timed_out else reply.exit_code,
            "exception_info": (
                f"An error occurred while executing the command: timed out after {timeout_s:g} seconds"
                if reply.timed_out
                else ""
            ),
            "extra": {"oom_killed": True} if reply.oom_killed else {},
        }
        _check_submitted(output)
        return output

    def _check_loop(self, command: str) -> None:
        limit = self._profile.config.loop_limit
        self._num_repeats = self._num_repeats + 1 if command == self._last_command else 1
        self._last_command = command
        if 0 < limit <= self._num_repeats:
            raise ended(AgentEnd.LOOP, f"{limit} identical commands in a row: {command[:200]!r}")

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Names that mini's own templates use; the sandbox's kernel version is left out."""
        system = {"system": "Linux", "release": "", "version": "", "machine": "x86_64"}
        return {**system, "cwd": self._environment.folder.workdir, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """Nothing is kept in mini's own format."""
        return {}


def _text(data: bytes, num_dropped: int) -> str:
    if not num_dropped:
        return data.decode("utf-8", "replace")
    half = len(data) // 2
    marker = f"\n[{num_dropped} bytes left out]\n".encode()
    return (data[:half] + marker + data[half:]).decode("utf-8", "replace")


def _check_submitted(output: dict[str, Any]) -> None:
    """mini's rule: the first line of output, and exit status 0."""
    lines = output["output"].lstrip().splitlines(keepends=True)
    if lines and lines[0].strip() == SUBMIT_LINE and output["returncode"] == 0:
        submission = "".join(lines[1:])
        extra = {"exit_status": "Submitted", "submission": submission}
        raise Submitted({"role": "exit", "content": submission, "extra": extra})


class PolicyAgent(DefaultAgent):
    """mini's agent with templates compiled once and without its own trajectory file."""

    def _render_template(self, template: str) -> str:
        return compiled(template).render(**self.get_template_vars())

    def save(self, path: Any, *extra_dicts: Any) -> dict[str, Any]:
        """Messages are written by the worker when the attempt is over."""
        return {}


class MiniAgent(BaseAgent):
    """Harbor's face of the agent."""

    @staticmethod
    def name() -> str:
        """Name in Harbor's results and trajectories."""
        return "mini"

    def version(self) -> str:
        """mini-swe-agent's version."""
        return mini_version

    def bind(
        self,
        gateway: GatewayClient,
        pool: Executor,
        config: HarnessConfig,
        record: AttemptRecord,
        profile: Profile,
    ) -> None:
        """Hands over what Harbor cannot pass."""
        self._gateway, self._pool, self._config = gateway, pool, config
        self._record, self._profile = record, profile

    async def setup(self, environment: BaseEnvironment) -> None:
        """The agent lives outside the sandbox: nothing to install."""

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Runs the agent to its end. Raises HealthcheckError, EngineFailedError and the like."""
        assert isinstance(environment, BrokerEnvironment)
        record, profile = self._record, self._profile
        loop = asyncio.get_running_loop()
        bridge = LoopBridge(loop, record.attempt_id)
        slack = self._config.max_turns_slack
        agent = PolicyAgent(
            GatewayModel(self._gateway, bridge, record, profile),
            SandboxCommands(environment, bridge, record, profile),
            system_template=profile.system_template,
            instance_template=profile.instance_template,
            step_limit=record.max_turns + slack if record.max_turns else 0,
            cost_limit=0.0,
            max_consecutive_format_errors=profile.config.max_format_errors,
        )
        thread = loop.run_in_executor(self._pool, agent.run, instruction)
        try:
            outcome = await asyncio.shield(thread)
        except asyncio.CancelledError:
            bridge.abandon()
            await asyncio.wait([thread])
            if not thread.cancelled():
                thread.exception()  # its AttemptAbandonedError is expected here
            raise
        finally:
            record.messages = list(agent.messages)
            context.metadata = {"num_model_calls": agent.n_calls}
        status = outcome.get("exit_status", "")
        record.agent_end = _MINI_ENDS.get(status) or AgentEnd(status)
        if record.agent_end is not AgentEnd.SUBMITTED:
            record.note(agent.messages[-1]["content"])
