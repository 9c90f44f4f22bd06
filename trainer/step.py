"""One optimizer step: forward and backward over micro-batches, checks, AdamW, schedule.

Owns the optimizer. The loss that `update` is given must already be divided by the GLOBAL
batch's normaliser, so that it sums over micro-batches to the batch's loss; megatron's mean over
micro-batches and over data-parallel ranks is multiplied away here.

Invariant: weights change only in `update`, and only when every log-prob and gradient is finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.batch import MicroBatch
from trainer.config import OptimConfig
from trainer.errors import NonFiniteError
from trainer.model import Policy

LossOf = Callable[[int, MicroBatch, torch.Tensor], torch.Tensor]
"""(index of the micro-batch, micro-batch, new log-probs [M]) -> its part of the batch's loss."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What a step did."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    logprobs: list[torch.Tensor]  # float32[M] a micro-batch, before the step
    entropy: float  # nats, mean over trained tokens; NaN when not asked for


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Rate of `step` (from 1): linear warm-up, then linear fall to the final fraction."""
    warmup = min(1.0, step / optim.warmup_steps) if optim.warmup_steps else 1.0
    progress = (step - 1) / num_steps
    return optim.lr * warmup * (1 - (1 - optim.final_lr_fraction) * progress)


class Learner:
    """Trains a Policy; one optimizer a stage."""

    def __init__(self, policy: Policy, logprob_chunk: int) -> None:
        self.policy = policy
        self._chunk = logprob_chunk
        self._optim = OptimConfig()
        self._num_steps = 1
        self.optimizer: Any = None
        self.num_updates = 0  # steps taken by this process

    def begin_stage(self, optim: OptimConfig, num_steps: int, router_aux_loss: float) -> None:
        """Makes an optimizer with empty state for a stage of num_steps."""
        self._optim, self._num_steps = optim, num_steps
        self.policy.set_router_aux_loss(router_aux_loss)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                use_distributed_optimizer=True,
                params_dtype=self.policy.dtype,
                bf16=self.policy.dtype is torch.bfloat16,
            ),
            [self.policy.ddp],
        )
        self.policy.config.grad_scale_func = self.optimizer.scale_loss

    @torch.no_grad()
    def logprobs(self, micros: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs [M] of each micro-batch's trained tokens under the current weights."""
        out: list[torch.Tensor] = []

        def forward(micro: MicroBatch) -> tuple[torch.Tensor, Callable[..., Any]]:
            hidden = self.policy.hidden(micro)

            def collect(hidden: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
                del non_loss_data
                return self.policy.logprobs(hidden, micro, self._chunk, with_entropy=False)[0]

            return hidden, collect

        out = self._run(forward, micros, forward_only=True, collect_non_loss_data=True)
        return out

    def _total(self, values: list[float]) -> list[float]:
        """Sums over all tokens of the batch, from what this rank saw of them."""
        # Those of one tensor-parallel group saw the same; an earlier pipeline stage saw nothing.
        total = torch.tensor(values, dtype=torch.float64, device=self.policy.device.torch_device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        summed: list[float] = total.tolist()
        return summed

    def update(
        self, micros: Sequence[MicroBatch], loss_of: LossOf, step: int, with_entropy: bool = False
    ) -> Update:
        """Takes optimizer step `step` (from 1) on a batch.

        Raises:
          NonFiniteError: a log-prob, the loss or a gradient is not finite; weights are as before.
        """
        assert self.optimizer is not None, "begin_stage comes first"
        ddp, scale = self.policy.ddp, len(micros) * parallel_state.get_data_parallel_world_size()
        ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        logprobs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        # Told after the backward pass, which the other ranks take part in.
        broken: list[str] = []
        index = iter(range(len(micros)))

        def forward(micro: MicroBatch) -> tuple[torch.Tensor, Callable[..., Any]]:
            hidden = self.policy.hidden(micro)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                new, entropy = self.policy.logprobs(hidden, micro, self._chunk, with_entropy)
                if message := _not_finite(new, micro):
                    broken.append(message)
                part = loss_of(next(index), micro, new)
                logprobs.append(new.detach())
                entropies.append(entropy.detach())
                return part * scale, part.detach()

            return hidden, loss

        parts = self._run(forward, micros, forward_only=False)
        seen = [float(part) for part in parts]
        num_tokens = sum(part.numel() for part in logprobs)
        entropy = float(sum(part.double().sum() for part in entropies))
        loss, num_tokens, entropy, num_broken = self._total(
            [sum(seen), num_tokens, entropy, len(broken)]
        )
        if num_broken:
            raise NonFiniteError(
                broken[0] if broken else "a log-prob on another rank is not finite"
            )
        self._check_gradients(loss)
        lr = learning_rate(self._optim, step, self._num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self.optimizer.step()
        self.num_updates += 1
        mean_entropy = entropy / max(num_tokens, 1) if with_entropy else math.nan
        return Update(loss, float(grad_norm), lr, logprobs, mean_entropy)

    def _run(
        self, forward: Callable[[MicroBatch], Any], micros: Sequence[MicroBatch], **kwargs: Any
    ) -> list[Any]:
        def forward_step(batches: Iterator[MicroBatch], _model: Any) -> Any:
            return forward(next(batches))

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self.policy.ddp],
            num_microbatches=len(micros),
            seq_length=max(m.tokens.numel() for m in micros),
            micro_batch_size=1,
            **kwargs,
        )
        return results

    def _check_gradients(self, loss: float) -> None:
        ddp = self.policy.ddp
        # The norm, because finite gradients whose norm overflows would be clipped to nothing.
        norms = [
            torch.linalg.vector_norm(b.grad_data)
            for b in [*ddp.buffers, *ddp.expert_parallel_buffers]
        ]
        # All ranks take the step, or none.
        worst = torch.stack(norms).double().sum()
        dist.all_reduce(worst)
        finite = bool(torch.isfinite(worst))
        if not finite or not math.isfinite(loss):
            raise NonFiniteError(
                f"loss {loss}, gradients finite: {finite}; the step was not taken: lower the "
                "learning rate, or look at the batch's log-ratios"
            )


def _not_finite(logprobs: torch.Tensor, micro: MicroBatch) -> str:
    """Which log-prob is not finite; empty: all are."""
    finite = torch.isfinite(logprobs.detach())
    if bool(finite.all()):
        return ""
    bad = int((~finite).nonzero()[0, 0])
    return (
        f"log-prob of id {int(micro.targets[bad])} is {float(logprobs[bad])} in sequence "
        f"{int(micro.sequence[bad])} of the batch; the step was not taken"
    )
