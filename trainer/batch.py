"""From recorded sequences to packed micro-batches.

    TokenSequence (proto) -> Sequence -> [mask stale, drop] -> plan_packs -> MicroBatch

A `Sequence` owns plain numpy arrays; a `MicroBatch` owns tensors on the device. A pack holds
whole sequences end to end; positions restart at each. Only trained tokens reach the output
layer: `slots` are the positions that predict them, so a target never comes from another
sequence, and prompts cost no logits. Legend: N ids of a sequence, T of a pack, M trained of a
pack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from proto import trajectory_pb2
from trainer.errors import BadSequenceError

if TYPE_CHECKING:
    import torch

    from trainer.layer_spec import PackedRows


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution that sampled a sequence; packs never mix two."""

    temperature: float = 1.0
    banned_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The routed experts of a model: L layers choose K of E experts for each token."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One branch of a trajectory. Arrays are [N]; entry i speaks of predicting token i."""

    attempt_id: str
    group_id: str
    branch_index: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    rollout_logprobs: npt.NDArray[np.float32]  # 0 where not sampled
    versions: npt.NDArray[np.int64]  # weight_version of each token; 0 where not sampled
    sampling: Sampling
    reward: float | None = None
    cause: int = 0  # trajectory_pb2.Cause of its trajectory's end
    # uint8 or uint16[N - 1, L, K]: the engine's choice at each token but the last, by which nothing
    # is predicted; None: not recorded. `broken_reason` checks it.
    experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None

    @property
    def num_trained(self) -> int:
        """Tokens whose loss counts."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Oldest weight_version over trained tokens; 0 when there is none."""
        versions = self.versions[self.loss_mask]
        return int(versions.min()) if versions.size else 0


def _array(
    data: bytes, dtype: npt.DTypeLike, count: int, name: str, owner: str
) -> npt.NDArray[np.generic]:
    wanted = np.dtype(dtype).itemsize * count
    if len(data) != wanted:
        raise BadSequenceError(
            f"attempt {owner}: {name} has {len(data)} B, want {wanted} B for {count} token_ids"
        )
    return np.frombuffer(data, dtype=dtype)


def from_proto(record: trajectory_pb2.TokenSequence, vocab_size: int) -> Sequence:
    """Checks a record and converts it.

    Args:
      record: one sequence; SFT records have no log-probs and no spans.
      vocab_size: ids must be below it.

    Raises:
      BadSequenceError: arrays of unequal length, an id outside the vocabulary, no ids, or a
        trained token outside every version span of a sampled record.
    """
    owner = f"{record.attempt_id!r} branch {record.branch_index}"
    count = len(record.token_ids) // 4
    ids = _array(record.token_ids, "<i4", count, "token_ids", owner)
    if count == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:  # type: ignore[call-overload]
        raise BadSequenceError(f"attempt {owner}: want 1 or more ids in [0, {vocab_size})")
    mask = _array(record.loss_mask, np.uint8, count, "loss_mask", owner).astype(np.bool_)
    # Nothing precedes the first id, so nothing predicts it.
    mask[0] = False
    sampled = bool(record.rollout_logprobs)
    logprobs = np.zeros(count, np.float32)
    if sampled:
        logprobs = _array(record.rollout_logprobs, "<f4", count, "rollout_logprobs", owner).astype(
            np.float32
        )
    versions = np.zeros(count, np.int64)
    for span in record.version_spans:
        versions[span.start : span.end] = span.weight_version
    if sampled and (mask & (versions == 0)).any():
        raise BadSequenceError(f"attempt {owner}: a trained token lies in no version span")
    banned = np.asarray(record.sampling.banned_token_ids, np.int64)
    if banned.size and (int(banned.min()) < 0 or int(banned.max()) >= vocab_size):
        raise BadSequenceError(f"attempt {owner}: a banned id is outside of [0, {vocab_size})")
    temperature = record.sampling.temperature if record.HasField("sampling") else 1.0
    return Sequence(
        attempt_id=record.attempt_id,
        group_id=record.group_id,
        branch_index=record.branch_index,
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=versions,
        sampling=Sampling(
            # Greedy data is never trained; SFT records carry no temperature.
            temperature=temperature if sampled or temperature > 0 else 1.0,
            banned_ids=tuple(record.sampling.banned_token_ids),
        ),
        reward=record.reward if record.HasField("reward") else None,
        cause=record.cause,
        experts=_experts(record.routed_experts) if record.HasField("routed_experts") else None,
    )


def _experts(
    routed: trajectory_pb2.RoutedExperts,
) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """As recorded; of shape [0, 0, 0] where the bytes are no whole number of tokens."""
    layout = routed.layout
    ids = np.frombuffer(routed.ids, np.uint8)
    width = layout.num_layers * layout.top_k * (1 if layout.num_experts <= 256 else 2)
    if not width or len(ids) % width:
        return np.zeros((0, 0, 0), np.uint8)
    typed = ids if layout.num_experts <= 256 else ids.view("<u2")
    return typed.reshape(-1, layout.num_layers, layout.top_k)


_POSITIVE = 1e-3
"""A log-prob above this is none: rounding stays far below."""
_TEMPERATURES = (0.01, 100.0)
"""What anybody samples with."""


def broken_reason(sequence: Sequence, layout: ExpertLayout | None = None) -> str:
    """Why a sampled sequence cannot be trained; empty when it can.

    A log-prob that is missing, not finite or of no probability, a banned id among the trained ones,
    or a temperature out of the ordinary would turn the loss into NaN or nonsense: the trajectory is
    rejected and counted, not repaired. With
    `layout` its experts are to be replayed, and must be choices that the model can make.
    """
    if layout is not None and (reason := broken_experts(sequence, layout)):
        return reason
    trained = sequence.loss_mask
    if not np.isfinite(sequence.rollout_logprobs[trained]).all():
        return "nonfinite_rollout_logprob"
    if (sequence.rollout_logprobs[trained] > _POSITIVE).any():
        return "positive_rollout_logprob"
    if (sequence.versions[trained] == 0).any():
        return "no_rollout_logprob"
    if (
        sequence.sampling.banned_ids
        and np.isin(sequence.token_ids[trained], sequence.sampling.banned_ids).any()
    ):
        return "banned_id_sampled"
    if sequence.sampling.temperature <= 0:
        return "greedy"
    if not _TEMPERATURES[0] <= sequence.sampling.temperature <= _TEMPERATURES[1]:
        return "temperature"
    return ""


def broken_experts(sequence: Sequence, layout: ExpertLayout) -> str:
    """Why the experts of a sequence cannot be replayed; empty when they can."""
    experts = sequence.experts
    if experts is None:
        return "no_routed_experts"
    if experts.shape != (len(sequence.token_ids) - 1, layout.num_layers, layout.top_k):
        return "routed_experts_shape"
    if experts.size and int(experts.max()) >= layout.num_experts:
        return "routed_expert_unknown"
    ordered = np.sort(experts, -1)
    # Twice the same expert is a choice that no router makes, and that megatron loses tokens over.
    return "routed_expert_twice" if (ordered[..., 1:] == ordered[..., :-1]).any() else ""


def mask_stale(sequence: Sequence, weight_version: int, max_staleness: int) -> Sequence:
    """Unmasks nothing; masks tokens sampled more than max_staleness versions ago."""
    fresh = sequence.versions >= weight_version - max_staleness
    return dataclasses.replace(sequence, loss_mask=sequence.loss_mask & fresh)


def plan_packs(lengths: Seq[int], keys: Seq[object], token_budget: int) -> list[list[int]]:
    """Splits units, of one or more sequences each, into packs of at most token_budget tokens. Pure.

    Args:
      lengths: tokens of each unit.
      keys: units of unequal keys never share a pack.
      token_budget: a unit longer than this gets a pack of its own.

    Returns:
      Indices of each pack, sorted by length within: neighbours are then padded little.
    """
    order = sorted(range(len(lengths)), key=lambda i: (repr(keys[i]), lengths[i], i))
    packs: list[list[int]] = []
    size, key = 0, object()
    for i in order:
        if not packs or keys[i] != key or size + lengths[i] > token_budget:
            packs.append([])
            size, key = 0, keys[i]
        packs[-1].append(i)
        size += lengths[i]
    return packs


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One pack as tensors, with what its trained tokens need."""

    tokens: torch.Tensor  # int64[T]
    rows: PackedRows
    slots: torch.Tensor  # int64[M]: positions whose hidden state predicts a trained token
    targets: torch.Tensor  # int64[M]
    rollout: torch.Tensor  # float32[M]
    versions: torch.Tensor  # int64[M]
    sequence: torch.Tensor  # int64[M]: index into the batch's sequences
    temperature: float
    banned: torch.Tensor | None  # bool[V]

    def routed_freely(self) -> MicroBatch:
        """The same pack, whose experts the model chooses by itself."""
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, experts=None))


def deal(lengths: Seq[int], num_ranks: int) -> list[list[int]]:
    """Deals packs out to data-parallel ranks, so that the tokens of each are near equal. Pure.

    Returns:
      Indices of each rank's packs, longest first; equal in number but for those that have one less.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for first in range(0, len(order), num_ranks):
        # A round gives each rank one; whoever has least takes the longest.
        takers = sorted(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        for rank, i in zip(takers, order[first : first + num_ranks], strict=False):
            hands[rank].append(i)
            tokens[rank] += lengths[i]
    return hands


def own_share(
    micros: Seq[MicroBatch], rank: int, num_ranks: int, multiple: int, device: torch.device
) -> list[MicroBatch]:
    """Those of a global batch that data-parallel rank `rank` works on: as many as every other's.

    A rank that was dealt one less gets an empty one of `multiple` tokens, because ranks that share
    experts must take every step together.
    """
    hands = deal([micro.tokens.numel() for micro in micros], num_ranks)
    own = [micros[i] for i in hands[rank]]
    return as_many_as_others(own, max(map(len, hands)), multiple, device)


def as_many_as_others(
    own: Seq[MicroBatch], count: int, multiple: int, device: torch.device
) -> list[MicroBatch]:
    """This rank's micro-batches, filled up to `count` with empty ones of `multiple` tokens."""
    return [*own, *(_empty(multiple, device) for _ in range(count - len(own)))]


def _empty(num_tokens: int, device: torch.device) -> MicroBatch:
    import torch

    from trainer.layer_spec import pack_rows

    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        rows=pack_rows([num_tokens], device),
        slots=none,
        targets=none,
        rollout=torch.zeros(0, device=device),
        versions=none,
        sequence=none,
        temperature=1.0,
        banned=None,
    )


def make_micro_batches(
    sequences: Seq[Sequence],
    token_budget: int,
    vocab_size: int,
    device: torch.device,
    trajectory: Seq[int] | None = None,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Packs sequences; those without a trained token are left out, for they add nothing.

    Sequences with experts have them replayed: all of a pack, or none.

    Args:
      multiple: packs are filled up to a multiple of so many tokens, which tensor-parallel ranks
        share out among them.
      trajectory: of each sequence; where given, sequences of one trajectory share a pack, even
        above token_budget.
    """
    units: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.num_trained:
            units.setdefault(i if trajectory is None else trajectory[i], []).append(i)
    members = list(units.values())
    packs = plan_packs(
        [sum(len(sequences[i].token_ids) for i in unit) for unit in members],
        [(sequences[u[0]].sampling, sequences[u[0]].experts is not None) for u in members],
        token_budget,
    )
    return [
        _pack(sequences, [i for unit in pack for i in members[unit]], vocab_size, device, multiple)
        for pack in packs
    ]


def _pack(
    sequences: Seq[Sequence],
    members: Seq[int],
    vocab_size: int,
    device: torch.device,
    multiple: int,
) -> MicroBatch:
    import torch

    from trainer.layer_spec import pack_rows

    chosen = [sequences[i] for i in members]
    tokens = torch.from_numpy(np.concatenate([s.token_ids for s in chosen]).astype(np.int64))
    mask = np.concatenate([s.loss_mask for s in chosen])
    owner = np.repeat(np.asarray(members, np.int64), [len(s.token_ids) for s in chosen])
    # loss_mask speaks of the token itself; the position before it predicts it. The first token
    # of a sequence is never trained, so this never crosses into the sequence before.
    positions = torch.from_numpy(np.flatnonzero(mask))

    def trained(arrays: Iterable[npt.NDArray[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(arrays))[mask]).to(device)

    banned = None
    if chosen[0].sampling.banned_ids:
        banned = torch.zeros(vocab_size, dtype=torch.bool)
        banned[list(chosen[0].sampling.banned_ids)] = True
        banned = banned.to(device)
    lengths = [len(s.token_ids) for s in chosen]
    filler = -len(tokens) % multiple
    if filler:
        lengths.append(filler)
    rows = pack_rows(lengths, device)
    if chosen[0].experts is not None:
        rows.experts = torch.from_numpy(_pack_experts(chosen, filler)).to(device)
    return MicroBatch(
        tokens=torch.nn.functional.pad(tokens, (0, filler)).to(device),
        rows=rows,
        slots=(positions - 1).to(device),
        targets=tokens[positions].to(device),
        rollout=trained(s.rollout_logprobs for s in chosen),
        versions=trained(s.versions for s in chosen),
        sequence=torch.from_numpy(owner[mask]).to(device),
        temperature=chosen[0].sampling.temperature,
        banned=banned,
    )


def _pack_experts(
    chosen: Seq[Sequence], filler: int
) -> npt.NDArray[np.uint8] | npt.NDArray[np.int32]:
    """Experts [T, L, K] of a pack. Last tokens and the filler, whose output nobody reads, take the
    first K experts.
    """
    known = [s.experts for s in chosen if s.experts is not None]
    assert len(known) == len(chosen), "sequences with and without experts in one pack"
    _, num_layers, top_k = known[0].shape
    unread = np.broadcast_to(np.arange(top_k, dtype=known[0].dtype), (1, num_layers, top_k))
    parts = [part for experts in known for part in (experts, unread)]
    packed = np.concatenate([*parts, *[unread] * filler])
    # torch computes little with uint16.
    return packed if packed.dtype == np.uint8 else packed.astype(np.int32)
