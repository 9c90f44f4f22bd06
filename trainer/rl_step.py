"""The parts of an RL step that all ranks do: read the batch's tokens, score them, update.

     first rank                         every rank
     claimed groups: references -->     fetch    its own trajectories out of the token store
                                        score    old and reference log-probs, where asked for
                                        update   forward, backward, AdamW
     figures of the whole batch <--     (gathered by each)

Each data-parallel rank reads, packs and trains the trajectories that it is dealt, whole ones. What
concerns the batch (advantages come from rewards alone, the loss's normaliser, what is dropped) is
agreed on by small messages, never by tokens. Owner: GridWork makes one an RL stage.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from proto import rollout_pb2, trajectory_pb2
from rollout.client import CorruptStoreError
from trainer import batch as batching
from trainer import diagnostics, group_batch, loss, ranks
from trainer.batch import MicroBatch
from trainer.config import TrainerConfig
from trainer.errors import BadSequenceError
from trainer.group_batch import GroupBatch, Share
from trainer.reference import Reference
from trainer.step import Learner, Update
from trainer.team import Team, together

_log = logging.getLogger(__name__)

Fetch = Callable[[Sequence[str], int], list[trajectory_pb2.TokenSequence]]
"""ManagerLink.fetch."""


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """What a data-parallel rank trained, as its last pipeline stage saw it."""

    tokens: diagnostics.ActiveTokens
    reference: npt.NDArray[np.float64] | None
    num_rejected: int
    kl: float


class RlStep:
    """One step after the other; `fetch`, `score` and `update` follow upon each other."""

    team_name = "rl"

    def __init__(
        self,
        team: Team,
        learner: Learner,
        config: TrainerConfig,
        fetch: Fetch,
        reference: Reference | None,
    ) -> None:
        self.team = team
        self._learner = learner
        self._config = config
        self._fetch_records = fetch
        self.reference = reference
        self._batch: GroupBatch | None = None
        self._version = 0
        self._micros: list[MicroBatch] = []
        self._old: list[torch.Tensor] | None = None
        self._scored: list[torch.Tensor] | None = None  # by the reference

    @together
    def fetch(
        self,
        serialized_groups: list[bytes],
        weight_version: int,
        max_staleness: int,
        ages: Mapping[int, int],
    ) -> GroupBatch:
        """Reads this rank's trajectories; returns what the whole batch is.

        Args:
          serialized_groups: BatchGroup messages, as claimed.
          weight_version: the trainer's.
          max_staleness: in updates.
          ages: version -> itself, counted so that one is one update; others stay as they are.

        Raises:
          RolloutError: the manager was not to be had here.
          RankFailedError: another rank could not read its own.
        """
        groups = [rollout_pb2.BatchGroup.FromString(data) for data in serialized_groups]
        rank = parallel_state.get_data_parallel_rank()
        own = group_batch.own_members(groups, rank, parallel_state.get_data_parallel_world_size())
        names = [group.group_id for group in groups]
        records, unreadable = ranks.in_step(lambda: self._read(dict(zip(names, own, strict=True))))
        lost: dict[str, str] = {}
        for there in ranks.to_all(unreadable):
            lost |= there
        sequences, malformed = self._checked(records)

        def aged(versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            distinct, inverse = np.unique(versions, return_inverse=True)
            return np.asarray([ages.get(v, v) for v in distinct.tolist()], np.int64)[inverse]

        self._version = weight_version
        self._batch = group_batch.build(
            [group for group in groups if group.group_id not in lost],
            sequences,
            self._config.rl,
            weight_version,
            max_staleness,
            aged,
            lost,
            self._learner.policy.experts if self._config.rl.routing_replay else None,
            {attempt for members in own for attempt in members},
            malformed,
            _exchange,
        )
        self._pack(self._batch)
        return dataclasses.replace(self._batch, sequences=[])

    @together
    def score(self) -> None:
        """Old log-probs and those of the reference, where the settings ask for them."""
        self._old = self._scored = None
        if not self._micros:
            return
        if self._config.rl.recompute_old_logprobs:
            self._old = self._learner.logprobs(self._micros)
        if self.reference is not None:
            self._scored = self.reference.score(self._learner, self._micros)

    @together
    def update(self, step: int) -> dict[str, float] | None:
        """Takes the optimizer step; returns its figures on the first rank, {} on the others.

        None when no token of the batch is trained, on any rank.

        Raises:
          NonFiniteError: a log-prob, the loss or a gradient is not finite; weights are as before.
        """
        batch = self._batch
        assert batch is not None, "fetch comes first"
        if not self._micros:
            return None
        trajectory = torch.tensor(batch.trajectory, dtype=torch.int64)
        advantages = torch.tensor(batch.advantages, dtype=torch.float32)
        sequence = trajectory[torch.cat([m.sequence.cpu() for m in self._micros])]
        settings = self._config.rl.loss
        # Over the whole batch, so that neither packing nor dealing can change the mean.
        weights = loss.token_weights(
            torch.ones(sequence.shape, dtype=torch.bool),
            sequence,
            settings.norm,
            settings.constant_length,
            (
                batch.num_trained - sequence.numel(),
                batch.num_trajectories - int(sequence.unique().numel()),
            ),
        ).split([m.targets.numel() for m in self._micros])
        num_rejected, kl = 0, 0.0

        def loss_of(i: int, micro: MicroBatch, new: torch.Tensor) -> torch.Tensor:
            nonlocal num_rejected, kl
            owner = micro.sequence.cpu()
            tokens = loss.TokenBatch(
                new=new,
                old=new.detach() if self._old is None else self._old[i],
                rollout=micro.rollout,
                advantage=advantages[owner].to(new.device),
                mask=torch.ones_like(new, dtype=torch.bool),
                weight=weights[i].to(new.device),
                sequence=trajectory[owner].to(new.device),
                reference=None if self._scored is None else self._scored[i],
            )
            result = loss.policy_loss(tokens, settings)
            num_rejected += result.num_rejected
            kl += result.kl
            return result.loss

        update = self._learner.update(self._micros, loss_of, step, with_entropy=True)
        own = self._tokens(batch, update, num_rejected, kl) if ranks.holds_tokens() else None
        gathered = [part for part in ranks.to_first(own) if part is not None]
        return self._figures(gathered, update) if gathered else {}

    def _read(
        self, own: Mapping[str, Sequence[str]]
    ) -> tuple[list[trajectory_pb2.TokenSequence], dict[str, str]]:
        """Own records, and the groups, with a reason, that cannot be read back."""
        try:
            return self._fetch_groups(own.values()), {}
        except CorruptStoreError:
            records, unreadable = [], {}
            for group_id, attempts in own.items():
                try:
                    records += self._fetch_groups([attempts])
                except CorruptStoreError as error:
                    _log.error("group %s is dropped: %s", group_id, error)
                    unreadable[group_id] = "corrupt_record"
            return records, unreadable

    def _checked(
        self, records: Iterable[trajectory_pb2.TokenSequence]
    ) -> tuple[list[batching.Sequence], set[str]]:
        """Sequences, without those of attempts with a record that breaks the contract, named beside."""
        vocab_size = self._learner.policy.vocab_size
        sequences, malformed = [], set()
        for record in records:
            try:
                sequences.append(batching.from_proto(record, vocab_size))
            except BadSequenceError as error:
                _log.error("a trajectory is rejected: %s", error)
                malformed.add(record.attempt_id)
        return [s for s in sequences if s.attempt_id not in malformed], malformed

    def _fetch_groups(
        self, attempts: Iterable[Sequence[str]]
    ) -> list[trajectory_pb2.TokenSequence]:
        ids = [attempt for group in attempts for attempt in group]
        return self._fetch_records(ids, self._config.sequences_per_fetch) if ids else []

    def _pack(self, batch: GroupBatch) -> None:
        policy, grid = self._learner.policy, self._config.grid
        device = policy.device.torch_device
        self._micros = batching.make_micro_batches(
            batch.sequences,
            self._config.token_budget,
            policy.vocab_size,
            device,
            batch.trajectory if self._config.rl.loss.needs_whole_trajectories else None,
            multiple=grid.tensor_parallel,
        )
        self._micros = batching.as_many_as_others(
            self._micros, max(ranks.to_all(len(self._micros))), grid.tensor_parallel, device
        )

    def _tokens(self, batch: GroupBatch, update: Update, num_rejected: int, kl: float) -> _Tokens:
        micros = self._micros
        sequence = torch.cat([m.sequence for m in micros]).cpu().numpy()
        new = _flat(update.logprobs)
        tokens = diagnostics.ActiveTokens(
            new=new,
            old=new if self._old is None else _flat(self._old),
            rollout=_flat([m.rollout for m in micros]),
            advantage=np.asarray(batch.advantages)[sequence],
            sequence=np.asarray(batch.trajectory, np.int64)[sequence],
            versions=torch.cat([m.versions for m in micros]).cpu().numpy(),
        )
        reference = None if self._scored is None else _flat(self._scored)
        return _Tokens(tokens, reference, num_rejected, kl)

    def _figures(self, parts: list[_Tokens], update: Update) -> dict[str, float]:
        tokens = diagnostics.joined([part.tokens for part in parts])
        held: dict[str, float] = {}
        scored = [part.reference for part in parts if part.reference is not None]
        if scored:
            settings = self._config.rl.loss
            held = diagnostics.reference_metrics(tokens.new, np.concatenate(scored), settings)
            held["loss_kl"] = sum(part.kl for part in parts)
        return (
            held
            | diagnostics.off_policy_metrics(tokens, self._config.rl.loss, self._version)
            | {
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "entropy_mean_nats": update.entropy,
                "correction_rejected_fraction": sum(p.num_rejected for p in parts)
                / len(tokens.new),
                "num_micro_batches": float(len(self._micros)),
            }
        )


def _exchange(share: Share) -> list[Share]:
    """What every data-parallel rank made of its trajectories."""
    count = parallel_state.get_data_parallel_world_size()
    if count == 1:
        return [share]
    shares: list[Share] = [share] * count
    dist.all_gather_object(shares, share, group=parallel_state.get_data_parallel_group())
    return shares


def _flat(parts: list[torch.Tensor]) -> npt.NDArray[np.float64]:
    return torch.cat(parts).double().cpu().numpy()
