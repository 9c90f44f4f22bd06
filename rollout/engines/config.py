"""Settings of the inference engines that one RolloutManager owns.

Owner: EnginePool and UpdateWindows read it; rollout/config.py re-exports it. Imports pydantic
only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineConfig(BaseModel):
    """How engines are started, watched and updated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Path
    """Absolute path of the engine environment's interpreter."""

    launcher: str = "rollout.engines.cpu_launcher"
    """Module that starts the server; `sglang.launch_server` on a machine with an accelerator."""

    model_path: Path
    """Hugging Face folder with config.json and the tokenizer. Weights in it are not needed."""

    load_format: Literal["dummy", "auto"] = "dummy"
    """`dummy`: start with meaningless weights, since nothing is served before the first update
    window closes; `auto`: read model_path's safetensors."""

    num_engines: int = Field(default=1, ge=0)
    """Servers to run; 0 where no agent asks a model (the oracle and nop agents)."""

    tensor_parallel: int = Field(default=1, ge=1, le=16)
    """Ranks of one engine, a process and an accelerator each, that hold a share of every weight."""

    ports: tuple[int, ...] = ()
    """One port an engine, 0 chooses a free one at each start; empty: all chosen."""

    context_length: int = Field(default=65536, gt=0)
    """Prompt plus sampled tokens of one request; the server refuses more."""

    max_total_tokens: int = Field(default=1_500_000, gt=0)
    """Tokens that fit one engine's KV cache: its token budget."""

    max_running_requests: int = Field(default=32, gt=0)
    """Requests that one engine decodes at once; more wait in its queue."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and KV cache."""

    routed_experts: bool = False
    """Engines tell the experts that they routed each token to, and turns are kept with them, for
    `trainer.rl.routing_replay`: layers x top-k bytes a token (two each above 256 experts)."""

    extra_flags: tuple[str, ...] = ()
    """Further SGLang flags, as `--name=value`."""

    weight_loader: str = "weightsync.sglang_loader.load"
    """Dotted name of the function that receives weights inside the engine."""

    kv_policy: Literal["flush", "keep"] = "flush"
    """KV cache at a weight update: `flush` retracts running requests and prefills them again,
    so that every entry belongs to the serving version. `keep` freezes them and lets them go on with
    what they have read and written: nothing is prefilled again, and tokens may rest on entries of
    older versions, down to the bound that each turn records."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """From spawning a server to its first healthy answer."""

    control_timeout_s: float = Field(default=30.0, gt=0)
    """Each control call: pause, begin, end, flush, version, continue."""

    window_timeout_s: float = Field(default=300.0, gt=0)
    """Longest that a window stays open; then its sender is given up and the window is ended."""

    health_timeout_s: float = Field(default=30.0, gt=0)
    """An engine that answers no load poll for this long is restarted. During a window an engine
    may be busy loading, so the bound there is window_timeout_s."""

    poll_interval_s: float = Field(default=1.0, gt=0)
    """Between two looks at an engine's load figures."""

    stop_timeout_s: float = Field(default=3.0, ge=0)
    """From SIGTERM to SIGKILL of an engine's process group."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of one engine within restart_window_s; one more and it stays failed."""

    restart_window_s: float = Field(default=600.0, gt=0)
    """Restarts older than this no longer count."""

    num_log_lines: int = Field(default=20, gt=0)
    """Last lines of a dead engine's log that its `detail` quotes."""

    num_threads: int = Field(default=1, gt=0)
    """OMP threads of an engine on CPU."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.ports and len(self.ports) != self.num_engines:
            raise ValueError(
                f"engines.ports has {len(self.ports)} entries for num_engines="
                f"{self.num_engines}: give one an engine (0 chooses a free port), or none"
            )
        taken = [port for port in self.ports if port]
        if len(set(taken)) != len(taken):
            raise ValueError(f"engines.ports names a port twice: {self.ports}")
        if self.max_total_tokens < self.context_length:
            raise ValueError(
                f"engines.max_total_tokens={self.max_total_tokens} is less than context_length="
                f"{self.context_length}: one full request would never fit; raise it"
            )
        if not self.python.is_absolute():
            raise ValueError(f"engines.python must be an absolute path, got {self.python}")
        return self
