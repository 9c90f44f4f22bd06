"""The reference policy of the KL term: weights that never change, beside those that are trained.

    score: exchange -> forward only -> exchange back

Owner: the RL stage. There is one model. The reference's weights lie in the host's memory and are
exchanged with the model's, tensor by tensor, for one forward pass a batch: on each rank a copy of
its weights is the whole cost, plus the largest tensor during an exchange; and twice the copying of
them a batch in time. A second model on the device would save that time.

Where the reference is the weights at the stage's start, they are written to the run folder when the
stage begins, in the form of a checkpoint, so that a resumed stage has the same reference, on another
grid too.
Invariant: after `score` the model's weights are what they were, bit for bit, also when it raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from trainer import checkpoint_state
from trainer.batch import MicroBatch
from trainer.checkpoint import CheckpointStore, Progress
from trainer.checkpoint_saver import CheckpointSaver
from trainer.config import LossConfig
from trainer.errors import BadRequestError
from trainer.model import Policy
from trainer.step import Learner

_log = logging.getLogger(__name__)


class Reference:
    """Weights on the host that a Policy can be lent for a forward pass."""

    def __init__(self, policy: Policy, load: Callable[[], None] | None = None) -> None:
        """Takes the policy's weights of the moment, or those that `load` puts in their place.

        The policy has its own weights, and torch its random state, when this returns.
        """
        self._policy = policy
        self._weights = [tensor.detach().cpu().clone() for tensor in self._tensors()]
        if load is None:
            return
        random_state = torch.get_rng_state()
        try:
            load()
        finally:
            self._exchange()
            torch.set_rng_state(random_state)

    @property
    def size_bytes(self) -> int:
        """Host memory that this rank's copy takes."""
        return sum(tensor.nbytes for tensor in self._weights)

    def score(self, learner: Learner, micros: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs [M] of each micro-batch's trained tokens under the reference.

        Its routers choose by themselves: the engine's choice is that of another policy.
        """
        with self._lent():
            return learner.logprobs([micro.routed_freely() for micro in micros])

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for kept, tensor in zip(self._weights, self._tensors(), strict=True):
            current = tensor.detach().cpu().clone()
            tensor.copy_(kept)
            kept.copy_(current)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._policy.module.parameters()
        yield from self._policy.module.buffers()


def of_stage(
    learner: Learner,
    config: LossConfig,
    folder: Path,
    timeout_s: float,
    progress: Progress,
    *,
    resumed: bool,
) -> Reference | None:
    """The reference of an RL stage that begins or goes on; None when the loss has no KL term.

    Args:
      learner: with the weights of the stage's start, unless `resumed`.
      folder: of this stage; holds the weights of its start. All ranks see it.
      timeout_s: how long ranks wait for one another when it is written.
      progress: what the kept weights are named for.
      resumed: the stage goes on from a checkpoint.

    Raises:
      BadRequestError: kl_reference cannot be used, or the weights of the stage's start are gone.
      CheckpointWriteError: the weights of the stage's start cannot be kept.
    """
    if not config.needs_reference:
        return None
    policy = learner.policy
    given = config.kl_reference
    if given is not None:
        reference = Reference(policy, lambda: policy.load_hf(given))
    elif not resumed:
        saver = CheckpointSaver(CheckpointStore(folder, kept=1), policy.device, timeout_s)
        saver.save(learner, progress)
        reference = Reference(policy)
    else:
        kept = CheckpointStore(folder, kept=1).latest()
        if kept is None:
            raise BadRequestError(
                f"rl.loss.kl is {config.kl!r}, and the weights of the stage's start are not in "
                f"{folder}: the stage began without a KL term, or the folder was cleaned. Go on "
                "with rl.loss.kl 'none', or name the weights in rl.loss.kl_reference"
            )
        reference = Reference(policy, lambda: checkpoint_state.load_model(learner, kept))
    _log.info("the KL reference takes %.1f MB of memory", reference.size_bytes / 1e6)
    return reference
