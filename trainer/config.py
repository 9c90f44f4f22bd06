"""Settings of the trainer process: one frozen model, read from the JSON file of `--config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from weightsync.config import WeightSyncConfig


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GridConfig(_Settings):
    """How the model is split over ranks."""

    tensor_parallel: int = Field(default=1, gt=0)
    """Ranks that share each matrix."""
    pipeline_parallel: int = Field(default=1, gt=0)
    """Ranks that share the layers."""
    expert_parallel: int = Field(default=1, gt=0)
    """Ranks that share the experts."""
    data_parallel: int = Field(default=1, gt=0)
    """Copies of the model, each on part of the batch."""

    context_parallel: int = Field(default=1, gt=0)
    """Ranks that share a sequence: 1, there is no more yet."""

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @model_validator(mode="after")
    def _no_context_parallelism(self) -> GridConfig:
        if self.context_parallel != 1:
            raise ValueError(
                f"grid.context_parallel is {self.context_parallel}: sequences are not split over "
                "ranks; set it to 1. Long ones fit by trainer.recompute and trainer.logprob_chunk"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_shared_out(self) -> GridConfig:
        shared_by = self.tensor_parallel * self.data_parallel
        if shared_by % self.expert_parallel:
            raise ValueError(
                f"grid.expert_parallel is {self.expert_parallel}, and experts are shared out among "
                f"tensor_parallel * data_parallel = {shared_by} ranks: set it to a divisor of that"
            )
        return self


class OptimConfig(_Settings):
    """AdamW and its learning-rate schedule, for one stage."""

    lr: float = Field(default=3e-4, gt=0, le=1)
    """Peak learning rate."""
    warmup_steps: int = Field(default=3, ge=0)
    """Steps of linear warm-up; the first step has lr / warmup_steps."""
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """The rate falls linearly over the stage to this fraction of the peak; 1 keeps it."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean squared gradient."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; norms are never decayed."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class SupervisedConfig(_Settings):
    """A stage that learns from a file of sequences."""

    optim: OptimConfig = OptimConfig()
    """Optimizer of the stage; its state starts empty."""
    batch_rows: int = Field(default=32, gt=0)
    """Sequences a step."""
    checkpoint_every_steps: int = Field(default=200, ge=0)
    """Saves a checkpoint every this many steps, beside the one at the stage's end; 0: never."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the experts' load-balancing loss."""


class PretrainOptimConfig(OptimConfig):
    """Defaults that teach a tiny model to copy."""

    lr: float = Field(default=3e-3, gt=0, le=1)
    """Peak learning rate."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up; the first step has lr / warmup_steps."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of matrices; norms are never decayed."""


class PretrainConfig(SupervisedConfig):
    """The PRETRAIN stage."""

    optim: PretrainOptimConfig = PretrainOptimConfig()
    """Optimizer of the stage; its state starts empty."""
    router_aux_loss: float = Field(default=0.001, ge=0)
    """Coefficient of the experts' load-balancing loss."""


class SftOptimConfig(OptimConfig):
    """Defaults for a short stage on demonstrations."""

    lr: float = Field(default=5e-4, gt=0, le=1)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of matrices; norms are never decayed."""


class SftConfig(SupervisedConfig):
    """The SFT stage."""

    optim: SftOptimConfig = SftOptimConfig()
    """Optimizer of the stage; its state starts empty."""
    batch_rows: int = Field(default=16, gt=0)
    """Sequences a step."""


class RlOptimConfig(OptimConfig):
    """Defaults for RL: a constant rate after the warm-up."""

    lr: float = Field(default=2e-4, gt=0, le=1)
    """Peak learning rate."""
    final_lr_fraction: float = Field(default=1.0, ge=0, le=1)
    """The rate falls linearly over the stage to this fraction of the peak; 1 keeps it."""


class LossConfig(_Settings):
    """The policy objective; loss.py has the formulas and their sources."""

    objective: Literal["decoupled", "bypass", "recompute_only"] = "decoupled"
    """decoupled: the ratio is to the recomputed policy, and each token is weighted by `correction`.
    bypass: the ratio is to the engine's log-probs, no weight. recompute_only: the ratio is to the
    recomputed policy, no weight; wrong for stale data, so max_staleness must be 0."""
    surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: each token's ratio, clipped. gspo: the geometric mean of a trajectory's ratios, clipped;
    its own mean is sequence_mean. cispo: the log-prob, weighted by its detached ratio up to
    cispo_cap; nothing is clipped."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio's trust region ends at 1 - clip_low; with gspo 3e-4 unless set."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio's trust region ends at 1 + clip_high; with gspo 4e-4 unless set."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Largest ratio that cispo weighs a log-prob with."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a negative advantage at this multiple of it; None: no bound."""
    correction: Literal["tis_token", "tis_sequence", "icepop", "mis_geometric"] = "tis_token"
    """Of `decoupled`, from w = exp(old - rollout) of each token. tis_token: w up to tis_cap.
    tis_sequence: the product over the trajectory, up to tis_cap. icepop: w inside the band, else 0.
    mis_geometric: w up to tis_cap where the trajectory's geometric mean lies inside the band,
    else 0."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest weight of the corrections that truncate."""
    band_low: float = Field(default=0.5, ge=0)
    """Lower end of the band; with mis_geometric 0.99 unless set."""
    band_high: float = Field(default=5.0, gt=0)
    """Upper end of the band; with mis_geometric 1.01 unless set."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A trajectory with a token whose w is below this gets weight 0 (1e-4 is in use); None: none."""
    log_ratio_clamp: float = Field(default=20.0, gt=0)
    """Log-ratios are clamped to +- this before exp; clamped tokens are counted."""
    norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Over what the loss is averaged: all trained tokens of the batch; each trajectory, then
    trajectories; or trajectories times constant_length."""
    constant_length: float = Field(default=0.0, ge=0)
    """Divisor of norm=constant (Dr.GRPO's maximum response length), in tokens."""
    kl: Literal["none", "k2", "k3"] = "none"
    """A term that holds the policy near a reference, whose log-probs are then computed once a batch,
    forward only. k2: half the squared difference of log-probs, whose gradient is that of the reverse
    KL. k3: exp(-u) - 1 + u, always positive, whose gradient is biased. none: no reference."""
    kl_coef: float = Field(default=1e-3, gt=0)
    """Factor of the term `kl`."""
    kl_k3_cap: float = Field(default=10.0, gt=0)
    """Largest k3 of a token, in nats; a token beyond it pulls no more, and is counted."""
    kl_reference: Path | None = None
    """Hugging Face folder of the reference, of the trained model's shapes. None: the weights at the
    stage's start, which are kept in the run folder for a resume."""

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference policy are part of the loss."""
        return self.kl != "none"

    @property
    def needs_whole_trajectories(self) -> bool:
        """Whether a token's loss depends on the other tokens of its trajectory."""
        is_corrected = self.objective == "decoupled" and (
            self.correction in ("tis_sequence", "mis_geometric") or self.veto is not None
        )
        return self.surrogate == "gspo" or is_corrected

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_choice(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        usual: dict[str, Any] = {}
        if data.get("surrogate") == "gspo":
            usual |= {"clip_low": 3e-4, "clip_high": 4e-4, "norm": "sequence_mean"}
        if data.get("correction") == "mis_geometric":
            usual |= {"band_low": 0.99, "band_high": 1.01}
        return usual | data

    @model_validator(mode="after")
    def _choices_fit(self) -> LossConfig:
        if self.norm == "constant" and self.constant_length == 0:
            raise ValueError("loss.norm is 'constant': set loss.constant_length above 0")
        if self.band_low >= self.band_high:
            raise ValueError(
                f"loss.band_low is {self.band_low} and loss.band_high {self.band_high}: no weight "
                "lies between"
            )
        if self.objective != "decoupled":
            unused = [name for name in ("correction", "veto") if name in self.model_fields_set]
            changed = [n for n in unused if getattr(self, n) != type(self).model_fields[n].default]
            if changed:
                raise ValueError(
                    f"loss.{changed[0]} is set, and loss.objective {self.objective!r} weighs no "
                    "token: use 'decoupled', or leave it out"
                )
        if self.surrogate != "ppo" and self.dual_clip is not None:
            raise ValueError(
                f"loss.dual_clip is of the surrogate 'ppo', not {self.surrogate!r}: leave it out"
            )
        for name in ("kl_coef", "kl_k3_cap", "kl_reference"):
            if self.kl == "none" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"loss.{name} is set, and loss.kl 'none' has no such term: set loss.kl to 'k2' "
                    f"or 'k3', or leave {name} out"
                )
        return self


class PeriodicEvaluationConfig(_Settings):
    """Evaluations on the dev tasks during RL; see selection.py."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluates before the first step, after every this many, and after the last; 0: never."""
    attempts_per_task: int = Field(default=2, gt=0)
    """Attempts at each dev task."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling; 0 is greedy."""
    timeout_s: float = Field(default=600.0, gt=0)
    """For one evaluation, in seconds; past it training goes on without its score."""
    max_tries: int = Field(default=3, gt=0)
    """Starts of one evaluation: a lost engine voids it, and the weights are published again."""
    keep_best: bool = True
    """The stage ends with the weights of the best score; False: with those of the last step."""


def _off(value: Any) -> Any:
    """TOML has no None."""
    return None if value == "off" else value


Limit = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_off)]
"""A number above 0, or `off` (None): not watched."""


class GuardsConfig(_Settings):
    """Bands that a healthy RL stage does not leave, and what happens when it does; see guards.py.

    The defaults are far from what healthy runs show and within what a collapse reaches; a band
    that a run needs wider, or does without (`off`), is one setting.
    """

    action: Literal["pause", "stop", "warn"] = "pause"
    """When a guard trips. pause: a checkpoint is saved and no step starts until someone lets the
    run go on. stop: a checkpoint is saved and the stage fails. warn: it is only told. A batch with
    a loss or gradient that is not finite trips at once, and is left out if training goes on."""
    patience_steps: int = Field(default=3, gt=0)
    """Steps in a row that must leave a band before its guard trips."""
    max_gap_mean_nats: Limit = 0.2
    """Of gap_total_mean_nats: mean |trainer - engine| log-prob, staleness included. Healthy: below
    0.01, with low-precision engines below 0.05."""
    max_gap_p99_nats: Limit = 2.0
    """Of gap_total_p99_nats, its 99th percentile: one token in a hundred seven times as likely."""
    min_ess_token: Limit = 0.3
    """Of ess_token_raw_rollout_to_trainer, the share of tokens that effectively count. Healthy:
    above 0.95."""
    min_entropy_nats: Limit = 0.001
    """Of entropy_mean_nats: a policy that has stopped to explore. Healthy: 0.03 and more."""
    max_entropy_nats: Limit = 2.5
    """Of entropy_mean_nats: a policy that has forgotten what to say. Healthy: below 1."""
    max_grad_norm: Limit = 50.0
    """Of grad_norm, before clipping. Healthy: about 1 and less."""

    @model_validator(mode="after")
    def _bands_can_be_kept(self) -> GuardsConfig:
        if self.min_ess_token is not None and self.min_ess_token > 1:
            raise ValueError(f"guards.min_ess_token is {self.min_ess_token}: a share is at most 1")
        low, high = self.min_entropy_nats, self.max_entropy_nats
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"guards.min_entropy_nats is {low} and guards.max_entropy_nats {high}: nothing lies "
                "between"
            )
        return self


class RlConfig(_Settings):
    """The reinforcement-learning stage."""

    optim: RlOptimConfig = RlOptimConfig()
    """Optimizer of the stage; its state starts empty."""
    groups_per_step: int = Field(default=16, gt=0)
    """Groups consumed by one optimizer step."""
    checkpoint_every_steps: int = Field(default=8, ge=0)
    """Saves a checkpoint every this many steps, beside the one at the stage's end; 0: never."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How rewards of a group become advantages; see advantage.py."""
    negative_advantage_scale: float = Field(default=1.0, ge=0)
    """Negative advantages are multiplied by this. 1 is the published method; a tiny model
    forgets less with about 0.2."""
    loss: LossConfig = LossConfig()
    """The objective."""
    guards: GuardsConfig = GuardsConfig()
    """What pauses the stage when its numbers leave their bands."""
    max_staleness: int = Field(default=4, ge=0)
    """Tokens sampled more than this many updates ago are masked. Versions that were published without
    an update, as after a resume, do not count."""
    min_trained_tokens: int = Field(default=1, gt=0)
    """A trajectory is dropped if masking stale tokens leaves fewer than this many."""
    overlong_filtering: bool = False
    """Tokens of a trajectory that a cap on turns, tokens or time ended are not trained; its reward
    stays in its group's statistics."""
    recompute_old_logprobs: bool = False
    """True runs a forward pass for the old log-probs. False takes them, detached, from the
    update's own forward pass: the same numbers as long as a batch is one optimizer step."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the experts' load-balancing loss; 0 in RL."""
    routing_replay: bool = False
    """Tokens go to the experts that the engine chose for them, in the update and in recomputed
    log-probs; the router is trained by the weights that it gives those. Needs a model with experts
    and `rollout.engines.routed_experts`; trajectories without them are rejected and counted."""
    evaluation: PeriodicEvaluationConfig = PeriodicEvaluationConfig()
    """Evaluations during the stage and the choice of its best weights."""
    batch_wait_s: float = Field(default=60.0, gt=0)
    """Deadline of one NextBatch call; the loop asks again until a batch comes."""

    @model_validator(mode="after")
    def _no_stale_data_without_weights(self) -> RlConfig:
        if self.loss.objective == "recompute_only" and self.max_staleness > 0:
            raise ValueError(
                "rl.loss.objective 'recompute_only' is wrong for stale data: set max_staleness "
                "to 0, or use 'decoupled'"
            )
        return self


class CheckpointConfig(_Settings):
    """How checkpoints are written; run_checkpoints.py and checkpoint_saver.py."""

    asynchronous: bool = True
    """The checkpoints of `checkpoint_every_steps` are written while training goes on, from a copy in
    the host's memory that is as large as what the rank writes, and stays. False: training waits,
    and nothing is copied. Checkpoints at a stage's end, at a stop and on request are waited for."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long training waits for a save that is still being written when the next is due or the
    process ends, from that save's beginning; ranks wait for one another as long."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a save during a stage that fails does, as on a full disk. continue: it is told and
    counted, and the next one that is due tries again. stop: the stage fails. The save at a stage's
    end fails the stage either way."""


class TrainerConfig(_Settings):
    """All settings of the trainer process."""

    @model_validator(mode="before")
    @classmethod
    def _folder_of_the_run(cls, data: Any) -> Any:
        """`weight_sync.disk.directory` of a trainer that has a run directory of its own."""
        if not isinstance(data, dict) or "run_dir" not in data:
            return data
        sync = data.get("weight_sync", {})
        disk = sync.get("disk", {}) if isinstance(sync, dict) else None
        if not isinstance(disk, dict):
            return data
        disk = {"directory": str(Path(data["run_dir"]) / "weightsync"), **disk}
        return {**data, "weight_sync": {**sync, "disk": disk}}

    model_dir: Path
    """Hugging Face folder: config.json and safetensors to start from."""
    run_dir: Path
    """Run folder: checkpoints/ and metrics/ are written below it."""
    manager_address: str = ""
    """HOST:PORT of the RolloutManager; RL, Publish and MeasureGap need it."""
    grid: GridConfig = GridConfig()
    """How the model is split over ranks. The trainer starts the others itself, on its own host, unless
    torchrun or the like started it: then WORLD_SIZE must be the grid's number of ranks."""
    layers: Literal["torch", "transformer_engine"] = "torch"
    """What layers are made of. torch: ours, on any device (layer_spec.py). transformer_engine: the
    library's, on GPUs; untested, for lack of one, and not in our environments."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations, of what is exported and of what engines are sent: set
    `rollout.engines.dtype` alike. With bfloat16 the optimizer's own weights, sums of gradients, the
    router's scores and the softmax stay float32."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seeds data order and random state."""
    num_threads: int = Field(default=1, gt=0, le=1024)
    """torch's intra-op threads on the CPU."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Speed of one rank's device in `dtype`, in 10^12 operations a second, of which the metrics'
    MFU is a share. None: what a matrix product reaches, measured when the process starts."""
    token_budget: int = Field(default=4096, gt=0)
    """Most tokens in a micro-batch; a longer sequence has one to itself."""
    logprob_chunk: int = Field(default=4096, gt=0)
    """Most trained tokens whose logits exist at one time."""
    recompute: bool = False
    """Layers keep their input only and are computed again in the backward pass: the gradient is
    the same, activations of one layer exist at a time, and a step takes about a third longer.
    Long sequences need it."""
    checkpoints_kept: int = Field(default=3, gt=0)
    """Newest checkpoints kept on disk; older ones are deleted."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How they are written."""
    keep_stage_ends: bool = True
    """Keeps the checkpoint at the end of each stage too: a replay of the RL stage starts from the
    one before it."""
    replay_of: Path | None = None
    """Folder of a recorded run whose RL stage is trained again: the first weights are those of its
    last checkpoint before RL, versions are those of the recorded batches, and no weights are
    sent."""
    export_shard_bytes: int = Field(default=4 * 2**30, gt=0)
    """Weights in one file of an export; more go into several files with an index."""
    sequences_per_fetch: int = Field(default=256, gt=0)
    """Attempts asked for in one FetchSequences call."""
    collective_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """How long a collective waits for a missing rank."""
    manager_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of short calls to the manager."""
    manager_retry_s: float = Field(default=120.0, ge=0)
    """How long calls to an unavailable manager are retried before the stage fails."""
    lock_wait_s: float = Field(default=60.0, ge=0)
    """At start, how long to wait for another trainer to let go of the run directory: one whose
    command was killed first ends its step and saves a checkpoint."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """On SIGTERM, how long the step in hand and open calls may take to end."""
    pretrain: PretrainConfig = PretrainConfig()
    """The PRETRAIN stage."""
    sft: SftConfig = SftConfig()
    """The SFT stage."""
    rl: RlConfig = RlConfig()
    """The RL stage."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How weights travel to the engines; `disk.directory` is by default a folder of run_dir."""
