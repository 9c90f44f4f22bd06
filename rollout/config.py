"""Settings of the RolloutManager.

Owner: rollout. Frozen; unknown keys are refused. `EngineConfig` is written beside the code
that uses it and re-exported here, so that callers need this file alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.engines.config import EngineConfig

__all__ = [
    "BreakerConfig",
    "CapsConfig",
    "EngineConfig",
    "PauseConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SchedulerConfig",
]


class CapsConfig(BaseModel):
    """Limits of one attempt, enforced by the gateway and checked again at admission."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens_per_turn: int = Field(8192, gt=0)
    """Sampled tokens in one turn."""
    max_total_tokens: int = Field(65536, gt=0)
    """Prompt plus sampled tokens of one trajectory."""
    max_turns: int = Field(80, gt=0)
    """Model calls in one attempt."""

    @model_validator(mode="after")
    def _turn_fits(self) -> CapsConfig:
        if self.max_new_tokens_per_turn > self.max_total_tokens:
            raise ValueError(
                f"max_new_tokens_per_turn {self.max_new_tokens_per_turn} is above max_total_tokens "
                f"{self.max_total_tokens}: no turn could use it; lower it"
            )
        return self


class SamplingConfig(BaseModel):
    """The distribution that training attempts sample from; the trainer computes the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of training attempts."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids whose logits are -inf when sampling and when training; special ids that end nothing."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a turn. They are sampled, so they may not be banned."""

    @model_validator(mode="after")
    def _disjoint(self) -> SamplingConfig:
        both = sorted(set(self.banned_token_ids) & set(self.stop_token_ids))
        if both:
            raise ValueError(
                f"token ids {both} are both banned and stop ids: a turn could never end; "
                "take them off banned_token_ids"
            )
        return self


class SchedulerConfig(BaseModel):
    """Admission of model calls to engines (rollout/scheduler)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    high_watermark: float = Field(0.9, gt=0, le=1)
    """Share of an engine's token budget that predictions may fill."""
    ageing_s: float = Field(30.0, gt=0)
    """Seconds of waiting that raise a queued call by one priority."""
    hard_context_cap: int = Field(65536, gt=0)
    """Prompt plus new tokens above which a call is refused at once."""
    growth_tokens: int = Field(1024, ge=0)
    """Tokens by which a session is predicted to grow beyond its present call."""
    ticket_ttl_s: float = Field(900.0, gt=0)
    """A granted call that neither appended nor released within this is given up as lost."""


class BreakerConfig(BaseModel):
    """The circuit breaker of each backend: sandboxes, engines, the verifier, each worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_s: float = Field(60.0, gt=0)
    """Seconds of outcomes that a closed breaker looks at."""
    away_failures: int = Field(3, gt=0)
    """Failures in a row that tell of the whole backend (it cannot be reached, or refuses every
    start) open the breaker."""
    min_failures: int = Field(8, gt=0)
    """So many failures in the window open it, of at least two tasks ..."""
    failure_ratio: float = Field(0.5, gt=0, le=1)
    """... if they are at least this share of the outcomes in the window."""
    doubt_failures: int = Field(3, gt=0)
    """So many failures in a row, of at least two tasks, put a closed backend in doubt: an attempt
    whose retries are spent does not end then, but is tried again for free."""
    open_s: float = Field(5.0, gt=0)
    """Seconds from opening to the first probes; doubles with each probe that fails."""
    max_open_s: float = Field(60.0, gt=0)
    """Longest time between probes: how long after its end an outage may still hold a run up."""
    num_probes: int = Field(2, gt=0)
    """Attempts that may try a half-open backend at a time. One that ends well closes it."""

    @model_validator(mode="after")
    def _ordered(self) -> BreakerConfig:
        if self.open_s > self.max_open_s:
            raise ValueError(
                f"breaker.open_s {self.open_s} is above breaker.max_open_s {self.max_open_s}: "
                "raise max_open_s or lower open_s"
            )
        return self


class PauseConfig(BaseModel):
    """When the manager pauses a run by itself, for a person to look at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: int = Field(200, gt=0)
    """Newest ended tries of training attempts that the rates are taken over. Tries that an
    outage excuses are left out."""
    min_tries: int = Field(50, gt=0)
    """With fewer there is no rate yet. Opening admission starts the count anew."""
    max_unclassified_rate: float = Field(0.05, ge=0, le=1)
    """Share of tries that end as `unclassified` above which the run pauses; 1: never."""
    max_failure_rate: float = Field(0.5, ge=0, le=1)
    """Share of tries with an infrastructure cause or `unclassified` above which the run pauses;
    1: never."""
    max_outage_s: float = Field(1800.0, gt=0)
    """A backend whose breaker stays open for so long pauses the run."""

    @model_validator(mode="after")
    def _reachable(self) -> PauseConfig:
        if self.min_tries > self.window:
            raise ValueError(
                f"pause.min_tries {self.min_tries} is above pause.window {self.window}: no rate "
                "would ever be taken; lower min_tries"
            )
        return self


class RolloutConfig(BaseModel):
    """One RolloutManager."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: Path
    """The run's directory: `ledger.db`, `tokens/` and `logs/` lie in it, on a local disk."""
    durability: Literal["process", "power"] = "process"
    """What a durable turn survives: the death of any process, or (by fsync) loss of power."""
    seed: int = 0
    """Seeds the order of the training tasks."""
    agent: Literal["mini", "oracle", "nop"] = "mini"
    """The agent of training attempts."""
    group_size: int = Field(8, gt=1)
    """Attempts at one task in a group."""
    batch_groups: int = Field(16, gt=0)
    """Groups in a batch; with max_staleness it bounds the groups under way."""
    max_staleness: int = Field(4, ge=0)
    """In optimizer updates. Started, unconsumed groups <= (max_staleness + 1) x batch_groups."""
    min_valid_members: int = Field(2, gt=1)
    """A group with fewer scored members is dropped: it has no baseline."""
    max_attempt_retries: int = Field(3, ge=0)
    """Retries of one attempt after infrastructure failures."""
    max_free_retries: int = Field(50, ge=0)
    """Retries of one attempt that spend none of max_attempt_retries: an outage, or the end of
    the manager or the worker, ended the try. Later ones are spent."""
    breaker: BreakerConfig = BreakerConfig()
    """The circuit breaker of each backend."""
    pause: PauseConfig = PauseConfig()
    """When failures pause the run."""
    drop_zero_variance: bool = True
    """Drops groups whose valid members have one reward before batching: they teach nothing."""
    max_zero_variance_refill: int = Field(256, ge=0)
    """Groups dropped for zero variance between two batches; later ones are kept, so that a
    policy that always fails or always succeeds still makes steps."""
    lease_ttl_s: float = Field(60.0, gt=0)
    """A worker's attempt that is not renewed for this long is requeued."""
    time_budget_s: float | None = Field(None, gt=0)
    """Decoding plus tool time of one attempt; None: none."""
    long_poll_s: float = Field(60.0, gt=0)
    """Longest that a blocking call waits when its caller set no deadline."""
    tick_s: float = Field(0.25, gt=0)
    """Between sweeps for expired leases and lost tickets."""
    lock_wait_s: float = Field(30.0, ge=0)
    """At start, how long to wait for another manager to let go of the ledger: one whose command was
    killed drains and ends its engines before it does."""
    drain_timeout_s: float = Field(10.0, ge=0)
    """On SIGTERM, calls in flight may take this long."""
    fetch_chunk_tokens: int = Field(262144, gt=0)
    """Most tokens in one message of FetchSequences (9 bytes each, and their experts)."""
    fetch_chunk_bytes: int = Field(3 * 2**20, gt=0, le=12 * 2**20)
    """Most bytes of them, spans left out; our channels carry messages of 16 MiB, others of 4."""
    keep_consumed_tokens: bool = True
    """Keeps token files that no checkpoint needs any more, so that the run can be replayed."""
    caps: CapsConfig = CapsConfig()
    """Limits of one attempt."""
    sampling: SamplingConfig = SamplingConfig()
    """How training attempts are sampled."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Admission of model calls."""
    engines: EngineConfig
    """The inference engines, which the manager starts and owns."""

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.min_valid_members > self.group_size:
            raise ValueError(
                f"min_valid_members {self.min_valid_members} is above group_size "
                f"{self.group_size}: every group would be dropped; lower it"
            )
        if self.caps.max_total_tokens > self.scheduler.hard_context_cap:
            raise ValueError(
                f"caps.max_total_tokens {self.caps.max_total_tokens} is above "
                f"scheduler.hard_context_cap {self.scheduler.hard_context_cap}: long attempts "
                "would be refused by the scheduler; raise hard_context_cap or lower the cap"
            )
        if self.engines.num_engines and self.caps.max_total_tokens > self.engines.context_length:
            raise ValueError(
                f"caps.max_total_tokens {self.caps.max_total_tokens} is above "
                f"engines.context_length {self.engines.context_length}: the engines would refuse "
                "long attempts; raise context_length or lower the cap"
            )
        return self


class RecordedRunConfig(BaseModel):
    """The server of a recorded run's batches, for a replay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout: RolloutConfig
    """The recorded run's manager: `ledger.db` and `tokens/` of its run_dir are read, never written."""
    scratch_dir: Path
    """A copy of the ledger lies here while the server runs."""
    num_steps: int = Field(gt=0)
    """Steps 1 to this must have been recorded, tokens included."""
