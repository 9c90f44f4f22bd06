"""Settings of a gateway. Imports pydantic only, because `launch` loads it.

Owner: rollout.gateway. Sampling and the caps of an attempt are the manager's: they come with
the session. What stands here bounds this process alone.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class GatewayConfig(BaseModel):
    """One gateway process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manager_address: str
    """HOST:PORT of the RolloutManager."""
    model_dir: Path
    """Folder with tokenizer.json, tokenizer_config.json and the chat template."""
    model_name: str = "swe_rl"
    """Shown by /v1/models. A request may name any model: its session decides what serves it."""

    turn_deadline_s: float = Field(900.0, gt=0)
    """From reading a request to its durable turn: queue, windows and retries included. Above
    the longest update window, and below the clients' own deadline."""
    admission_wait_s: float = Field(60.0, gt=0)
    """One AdmitTurn call may block this long; it is repeated until turn_deadline_s."""
    manager_call_s: float = Field(30.0, gt=0)
    """Deadline of every other call to the manager."""
    manager_retry_pause_s: float = Field(0.2, gt=0)
    """Pause before a call to an unreachable manager is repeated."""
    max_engine_retries: int = Field(3, ge=0)
    """Further engines that a turn may try after one died or aborted it."""
    engine_connect_s: float = Field(10.0, gt=0)
    """Time to connect to an engine."""
    max_engine_connections: int = Field(0, ge=0)
    """Connections to all engines together; 0: no limit, the scheduler bounds the calls."""
    abort_timeout_s: float = Field(5.0, gt=0)
    """Deadline of telling an engine that a call was given up."""

    max_sessions: int = Field(4096, gt=0)
    """Sessions held in memory; the longest unused goes first, and is loaded again if needed."""
    max_request_bytes: int = Field(64 * 2**20, gt=0)
    """Largest request body."""
    retry_after_s: int = Field(1, ge=0)
    """Retry-After of answers that are worth a retry."""
    ping_interval_s: float = Field(10.0, gt=0)
    """A stream that waits for its turn gets a comment this often."""
    drain_timeout_s: float = Field(10.0, ge=0)
    """On SIGTERM or SIGINT, turns under way get this long before they are cut."""

    tls_certificate: Path | None = None
    """PEM chain; needed off loopback. The session key authenticates, so it must not be seen."""
    tls_private_key: Path | None = None
    """PEM key of the certificate; needed off loopback."""

    @model_validator(mode="after")
    def _consistent(self) -> GatewayConfig:
        if self.admission_wait_s > self.turn_deadline_s:
            raise ValueError(
                f"admission_wait_s {self.admission_wait_s} is above turn_deadline_s "
                f"{self.turn_deadline_s}: a turn would end before its first answer; lower it"
            )
        if (self.tls_certificate is None) != (self.tls_private_key is None):
            raise ValueError("tls_certificate and tls_private_key must be set together")
        return self
