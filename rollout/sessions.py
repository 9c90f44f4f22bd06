"""Sessions: what a key stands for, its caps, and its durable turns.

Owner: rollout.manager. Works on the ledger's rows and the token store. Invariant: a turn's
record is on disk before its row, and both before the gateway may answer its client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_table import Attempt, AttemptTable
from rollout.config import RolloutConfig
from rollout.errors import BadRequestError, CapExceededError, ConflictError, NotFoundError
from rollout.evaluations import Evaluations
from rollout.experts import bytes_per_token, check_experts
from rollout.sequences import SequenceTotals, build_sequences, check_turn
from rollout.token_store import TokenStore
from rollout.turn_times import WindowLog, turn_times


class Sessions:
    """Turns of attempts, from their admission to their training sequences."""

    def __init__(
        self,
        config: RolloutConfig,
        attempts: AttemptTable,
        evaluations: Evaluations,
        tokens: TokenStore,
        expert_layout: tpb.ExpertLayout | None = None,
    ) -> None:
        """Args: expert_layout is what turns are recorded with; None: without experts."""
        self.expert_layout = expert_layout
        self._config = config
        self._attempts = attempts
        self._evaluations = evaluations
        self._tokens = tokens

    def caps(self) -> tpb.TokenCaps:
        """Limits of every attempt."""
        return tpb.TokenCaps(**self._config.caps.model_dump())

    def sampling(self, attempt: Attempt) -> tpb.SamplingParams:
        """How the attempt samples: an evaluation brings its own temperature."""
        sampling = self._config.sampling
        temperature = sampling.temperature
        if attempt.evaluation:
            temperature = self._evaluations.get(attempt.evaluation).temperature
        return tpb.SamplingParams(
            temperature=temperature,
            banned_token_ids=sorted(set(sampling.banned_token_ids)),
            stop_token_ids=sorted(set(sampling.stop_token_ids)),
        )

    def turns(self, attempt: Attempt) -> Iterator[tpb.TurnRecord]:
        """Durable turns of the attempt's present try, in order."""
        for location in self._attempts.turn_locations(attempt.attempt_id, attempt.epoch):
            yield tpb.TurnRecord.FromString(self._tokens.read(location))

    def check_caps(self, attempt: Attempt, request: pb.AdmitTurnRequest) -> None:
        """Raises CapExceededError, which names the cap, or BadRequestError."""
        caps, where = self._config.caps, f"attempt {attempt.attempt_id}"
        total = request.prompt_tokens + request.max_new_tokens
        if request.max_new_tokens < 1 or not request.ticket_id:
            raise BadRequestError(f"{where}: want a ticket_id and max_new_tokens > 0")
        if attempt.num_turns >= caps.max_turns:
            raise CapExceededError(f"{where} used its max_turns of {caps.max_turns}", "max_turns")
        if request.max_new_tokens > caps.max_new_tokens_per_turn:
            raise CapExceededError(
                f"{where}: max_new_tokens {request.max_new_tokens} is above "
                f"max_new_tokens_per_turn {caps.max_new_tokens_per_turn}",
                "max_new_tokens_per_turn",
            )
        if total > caps.max_total_tokens:
            raise CapExceededError(
                f"{where}: {request.prompt_tokens} prompt and {request.max_new_tokens} new tokens "
                f"are above max_total_tokens {caps.max_total_tokens}",
                "max_total_tokens",
            )

    def pin_violation(self, attempt: Attempt, turn: tpb.TurnRecord) -> str:
        """What is wrong with the versions of an evaluation's turn; empty: nothing."""
        if not attempt.evaluation:
            return ""
        pinned = self._evaluations.get(attempt.evaluation).weight_version
        others = {s.weight_version for s in turn.version_spans} - {pinned}
        return f"sampled at weight_version {sorted(others)}, pinned to {pinned}" if others else ""

    def most_expert_bytes(self, turn: tpb.TurnRecord) -> int:
        """Bytes of experts that may come with a turn.

        Raises BadRequestError where they are not recorded, or laid out otherwise.
        """
        if self.expert_layout is None or turn.expert_layout != self.expert_layout:
            raise BadRequestError(
                f"turn {turn.turn_index} of attempt {turn.attempt_id} comes with experts laid out as "
                f"{turn.expert_layout}; this run records {self.expert_layout or 'none'}"
            )
        tokens = min(turn.num_routed_tokens, self._config.caps.max_total_tokens)
        return tokens * bytes_per_token(self.expert_layout)

    def append(self, attempt: Attempt, turn: tpb.TurnRecord, experts: bytes = b"") -> int | None:
        """Makes a turn durable, with the experts at its tokens where they are recorded.

        Returns the ids of its whole chain, None for a repeated turn.

        Raises:
            ConflictError: another turn stands at this index.
            BadRequestError: the turn does not follow, or is malformed.
        """
        payload = turn.SerializeToString(deterministic=True)
        digest = hashlib.sha256(payload).digest()
        where = f"attempt {attempt.attempt_id}"
        known = self._attempts.turn_digest(attempt.attempt_id, attempt.epoch, turn.turn_index)
        if known is not None:
            if known != digest:
                raise ConflictError(
                    f"{where} has another turn {turn.turn_index}; load the session again"
                )
            return None
        if turn.turn_index != attempt.num_turns:
            raise BadRequestError(
                f"{where}: got turn {turn.turn_index}, wanted {attempt.num_turns}; load the "
                "session again"
            )
        summary = check_turn(turn, self._parent_length(attempt, turn))
        check_experts(turn, summary.total_length, experts)
        location = self._tokens.append(attempt.attempt_id, payload, before=experts)
        self._attempts.add_turn(attempt, turn.turn_index, digest, summary, location)
        return summary.total_length

    def totals(self, attempt: Attempt, windows: WindowLog) -> tuple[SequenceTotals, pb.TurnTimes]:
        """Sizes, versions and times of the attempt's present try."""
        turns = list(self.turns(attempt))
        return build_sequences(turns)[1], turn_times(turns, windows)

    def training_sequences(self, attempt_id: str) -> list[tpb.TokenSequence]:
        """The branches of a finished attempt. Raises NotFoundError for any other."""
        attempt = self._finished(attempt_id)
        locations = self._attempts.turn_locations(attempt_id, attempt.epoch)

        def experts_of(turn: tpb.TurnRecord) -> bytes:
            size = turn.num_routed_tokens * bytes_per_token(turn.expert_layout)
            return self._tokens.read_before(locations[turn.turn_index], size)

        branches, _ = build_sequences(list(self.turns(attempt)), experts_of)
        for branch in branches:
            branch.group_id, branch.task_id = attempt.group_id, attempt.task_id
            branch.cause = tpb.Cause.ValueType(attempt.cause)
            if attempt.reward is not None:
                branch.reward = attempt.reward
        return branches

    def finished_turns(self, attempt_id: str) -> Iterator[tpb.TurnRecord]:
        """Turns of a finished attempt, in order. Raises NotFoundError for any other."""
        return self.turns(self._finished(attempt_id))

    def _finished(self, attempt_id: str) -> Attempt:
        attempt = self._attempts.get(attempt_id)
        if attempt.state != "finished":
            raise NotFoundError(f"attempt {attempt_id} is {attempt.state}: not finished yet")
        return attempt

    def _parent_length(self, attempt: Attempt, turn: tpb.TurnRecord) -> int:
        if turn.parent_turn_index < 0:
            return 0
        length = self._attempts.turn_length(
            attempt.attempt_id, attempt.epoch, turn.parent_turn_index
        )
        if length is None:
            raise BadRequestError(
                f"turn {turn.turn_index} of attempt {attempt.attempt_id} extends turn "
                f"{turn.parent_turn_index}, which is not there"
            )
        return length
