"""Turns to training sequences: the end of the sampled-token contract.

Owner: rollout.manager. Pure; numpy only. A turn's ids are those that it keeps of its parent
chain, then its prompt ids, then its sampled ids. Turns form a tree, and each chain from the
root to a turn that nothing fully extends is one branch. The main line (branch 0) ends in the
attempt's last ordinary turn.

loss_mask of a sampled id is
  * 0 on side turns;
  * 1 on compaction turns;
  * 1 on ordinary turns where a later turn keeps the id in its history (the agent received it
    and its text stands), and on the attempt's last ordinary turn;
  * 0 otherwise: abandoned resends, and assistant text that the client cut from its history.
    The last message of a sub-agent, which nothing extends either, is masked with them.
Prompt ids are 0. An id shared by branches is trained in the first of them only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proto import trajectory_pb2 as tpb
from rollout.errors import BadRequestError, CorruptStoreError
from rollout.experts import chain_experts

_IDS = np.dtype("<i4")
_LOGPROBS = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class SequenceTotals:
    """Sizes and versions of a trajectory, as its TrajectoryRef reports them."""

    num_tokens: int  # ids over all branches, shared ones once
    num_trained_tokens: int
    num_turns: int
    oldest_weight_version: int  # over trained ids; 0 when there are none
    newest_weight_version: int


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """What a turn adds, without its arrays."""

    num_prompt: int
    num_sampled: int
    total_length: int  # whole chain after this turn


class _Chain:
    """The ids of one turn's chain, with where each came from.

    owner[i] is the turn that brought id i; -1 - turn for a prompt id, turn for a sampled one.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        owner: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        versions: npt.NDArray[np.int64],
    ) -> None:
        self.ids, self.owner, self.logprobs, self.versions = ids, owner, logprobs, versions

    def extended(self, turn: tpb.TurnRecord) -> _Chain:
        keep = turn.history_length
        prompt = np.frombuffer(turn.prompt_ids, _IDS)
        sampled = np.frombuffer(turn.sampled_ids, _IDS)
        versions = np.zeros(len(sampled), np.int64)
        for span in turn.version_spans:
            versions[span.start : span.end] = span.weight_version
        zeros = np.zeros(len(prompt))
        return _Chain(
            np.concatenate([self.ids[:keep], prompt, sampled]),
            np.concatenate(
                [
                    self.owner[:keep],
                    np.full(len(prompt), -1 - turn.turn_index, np.int32),
                    np.full(len(sampled), turn.turn_index, np.int32),
                ]
            ),
            np.concatenate(
                [
                    self.logprobs[:keep],
                    zeros.astype(_LOGPROBS),
                    np.frombuffer(turn.rollout_logprobs, _LOGPROBS),
                ]
            ),
            np.concatenate([self.versions[:keep], zeros.astype(np.int64), versions]),
        )


_EMPTY = _Chain(
    np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64)
)


def check_turn(turn: tpb.TurnRecord, parent_length: int) -> TurnSummary:
    """Checks one turn against the length of its parent's chain (0 at the root).

    Raises:
        BadRequestError: arrays of unlike length, spans that do not cover the sampled ids, a
            history longer than the parent's, or unset fields.
    """
    where = f"turn {turn.turn_index} of attempt {turn.attempt_id}"
    num_sampled, odd = divmod(len(turn.sampled_ids), 4)
    num_prompt, odd_prompt = divmod(len(turn.prompt_ids), 4)
    if odd or odd_prompt or len(turn.rollout_logprobs) != 4 * num_sampled:
        raise BadRequestError(
            f"{where}: got {len(turn.prompt_ids)} B of prompt ids, {len(turn.sampled_ids)} B of "
            f"sampled ids and {len(turn.rollout_logprobs)} B of log-probs; want multiples of 4 "
            "and one log-prob a sampled id"
        )
    if not np.isfinite(np.frombuffer(turn.rollout_logprobs, _LOGPROBS)).all():
        raise BadRequestError(f"{where}: rollout_logprobs hold a NaN or infinity")
    if not -1 <= turn.parent_turn_index < turn.turn_index or turn.history_length > parent_length:
        raise BadRequestError(
            f"{where}: keeps {turn.history_length} ids of turn {turn.parent_turn_index}, which "
            f"has {parent_length}; want an earlier turn and at most its ids"
        )
    position = 0
    for span in turn.version_spans:
        if span.start != position or span.end <= span.start or span.weight_version <= 0:
            break
        position = span.end
    if position != num_sampled:
        raise BadRequestError(
            f"{where}: version_spans cover [0, {position}) of {num_sampled} sampled ids; want "
            "them to cover all, in order, each with a weight_version above 0"
        )
    if not turn.kind or not turn.finish_reason:
        raise BadRequestError(f"{where}: kind and finish_reason must be set")
    return TurnSummary(num_prompt, num_sampled, turn.history_length + num_prompt + num_sampled)


def build_sequences(
    turns: Sequence[tpb.TurnRecord],
    experts_of: Callable[[tpb.TurnRecord], bytes] | None = None,
) -> tuple[list[tpb.TokenSequence], SequenceTotals]:
    """The branches of one attempt, the main line first, and its totals.

    Args:
        turns: every turn of one try, in the order of turn_index from 0.
        experts_of: reads the experts recorded with a turn; None: sequences are made without.

    Returns:
        Sequences without group, task, reward and cause, which the ledger knows. Branches
        other than the main line that train nothing are left out.

    Raises:
        CorruptStoreError: turns are missing or were sampled in unlike ways.
    """
    chains: list[_Chain] = []
    for index, turn in enumerate(turns):
        if turn.turn_index != index or turn.parent_turn_index >= index:
            raise CorruptStoreError(
                f"attempt {turn.attempt_id}: turn {turn.turn_index} stands at {index}"
            )
        parent = chains[turn.parent_turn_index] if turn.parent_turn_index >= 0 else _EMPTY
        chains.append(parent.extended(turn))
    kept = _trained_counts(turns, chains)
    sequences: list[tpb.TokenSequence] = []
    taken = [0] * len(turns)  # sampled ids of a turn already trained in an earlier branch
    for tip in _tips(turns, chains):
        sequence = _sequence(turns, chains[tip], kept, taken)
        if not sequences or any(sequence.loss_mask):
            sequence.branch_index = len(sequences)
            routed = experts_of and chain_experts(turns, tip, len(chains[tip].ids), experts_of)
            if routed:
                sequence.routed_experts.CopyFrom(routed)
            sequences.append(sequence)
    return sequences, _totals(turns, sequences)


def _trained_counts(turns: Sequence[tpb.TurnRecord], chains: Sequence[_Chain]) -> list[int]:
    """Of each turn, how many of its first sampled ids are trained."""
    agent = [t.turn_index for t in turns if t.kind == tpb.TURN_KIND_AGENT]
    counts = []
    for turn, chain in zip(turns, chains, strict=True):
        num_sampled = len(turn.sampled_ids) // 4
        start = len(chain.ids) - num_sampled
        if turn.kind == tpb.TURN_KIND_COMPACTION:
            counts.append(num_sampled)
        elif turn.kind != tpb.TURN_KIND_AGENT:
            counts.append(0)
        elif turn.turn_index == agent[-1]:
            counts.append(num_sampled)
        else:
            children = [t for t in turns if t.parent_turn_index == turn.turn_index]
            stands = max((t.history_length for t in children), default=0) - start
            counts.append(min(max(stands, 0), num_sampled))
    return counts


def _tips(turns: Sequence[tpb.TurnRecord], chains: Sequence[_Chain]) -> list[int]:
    """Turns that nothing fully extends, the main line's first, then in order."""
    extended = {
        t.parent_turn_index
        for t in turns
        if t.parent_turn_index >= 0 and t.history_length == len(chains[t.parent_turn_index].ids)
    }
    tips = [t.turn_index for t in turns if t.turn_index not in extended]
    last_agent = max((t.turn_index for t in turns if t.kind == tpb.TURN_KIND_AGENT), default=-1)
    # A side turn may extend the last ordinary turn: the main line is any tip that holds it.
    return sorted(tips, key=lambda tip: (not (chains[tip].owner == last_agent).any(), tip))


def _sequence(
    turns: Sequence[tpb.TurnRecord], chain: _Chain, kept: Sequence[int], taken: list[int]
) -> tpb.TokenSequence:
    mask = np.zeros(len(chain.ids), np.uint8)
    sampling: tpb.SamplingParams | None = None
    for index in np.unique(chain.owner[chain.owner >= 0]):
        turn = turns[index]
        places = np.flatnonzero(chain.owner == index)
        upto = min(kept[index], len(places))
        if upto <= taken[index]:
            continue
        mask[places[taken[index] : upto]] = 1
        taken[index] = upto
        if sampling is not None and sampling != turn.sampling:
            raise CorruptStoreError(
                f"attempt {turn.attempt_id}: turn {index} was sampled unlike the turns before it"
            )
        sampling = turn.sampling
    trained_versions = chain.versions[mask == 1]
    return tpb.TokenSequence(
        attempt_id=turns[0].attempt_id,
        token_ids=chain.ids.astype(_IDS).tobytes(),
        loss_mask=mask.tobytes(),
        rollout_logprobs=chain.logprobs.astype(_LOGPROBS).tobytes(),
        version_spans=_spans(chain),
        sampling=sampling or turns[0].sampling,
        oldest_weight_version=int(trained_versions.min()) if trained_versions.size else 0,
    )


def _spans(chain: _Chain) -> list[tpb.VersionSpan]:
    """Spans over the sampled ids of the chain; a span never crosses a prompt id."""
    sampled = np.where(chain.owner >= 0, chain.versions, 0)
    edges = np.flatnonzero(np.diff(sampled)) + 1
    bounds = [0, *edges.tolist(), len(sampled)]
    return [
        tpb.VersionSpan(weight_version=int(sampled[start]), start=start, end=end)
        for start, end in itertools.pairwise(bounds)
        if end > start and sampled[start] > 0
    ]


def _totals(
    turns: Sequence[tpb.TurnRecord], sequences: Sequence[tpb.TokenSequence]
) -> SequenceTotals:
    oldest, newest, trained = 0, 0, 0
    for sequence in sequences:
        mask = np.frombuffer(sequence.loss_mask, np.uint8)
        trained += int(mask.sum())
        for span in sequence.version_spans:
            if mask[span.start : span.end].any():
                newest = max(newest, span.weight_version)
        if sequence.oldest_weight_version:
            oldest = min(oldest or sequence.oldest_weight_version, sequence.oldest_weight_version)
    return SequenceTotals(
        num_tokens=sum((len(t.prompt_ids) + len(t.sampled_ids)) // 4 for t in turns),
        num_trained_tokens=trained,
        num_turns=len(turns),
        oldest_weight_version=oldest,
        newest_weight_version=newest,
    )
