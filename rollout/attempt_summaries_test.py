"""What the manager tells about each attempt, over gRPC and from the ledger's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from proto import rollout_pb2 as pb
from proto import trajectory_pb2 as tpb
from rollout.attempt_summaries import main
from rollout.client import read_attempts
from rollout.fakes import Testbed, begin, lease, next_batch, play


async def test_a_summary_tells_what_became_of_an_attempt(tmp_path: Path) -> None:
    async with Testbed(tmp_path, max_attempt_retries=1, max_staleness=1) as client:
        await begin(client)
        (first, second, *rest) = await lease(client, 4)
        failed = tpb.CAUSE_SANDBOX_FAILED
        assert (await play(client, first, None, cause=failed, num_turns=0)).requeued
        (again,) = await lease(client, 1)
        for attempt, reward in ((again, 1.0), (second, 0.0), *((r, 1.0) for r in rest)):
            await play(client, attempt, reward)
        dropped = rest[0].group_id
        batch = await next_batch(client, 1, num_groups=1)
        told = pb.TrainedTrajectory(
            attempt_id=first.attempt_id, num_tokens=3, num_tokens_masked_stale=1
        )
        await client.ack_batch(
            pb.AckBatchRequest(
                batch_id=batch.batch_id, step=1, weight_version=1, trajectories=[told]
            )
        )
        summaries = {s.ref.attempt_id: s for s in await client.list_attempts()}
        mine = summaries[first.attempt_id]
        assert (mine.group_state, mine.group_reason, mine.num_tries) == ("trained", "", 2)
        assert mine.trained == told
        assert [t.cause for t in mine.earlier_tries] == [failed]
        assert not summaries[second.attempt_id].HasField("trained")
        other = summaries[rest[0].attempt_id]
        assert (other.ref.group_id, other.group_state) == (dropped, "dropped")
        assert other.group_reason == "zero_variance"

        # Another program reads the same from the file, while the manager has it.
        assert main(["--ledger", str(tmp_path / "ledger.db"), "--out", str(tmp_path / "a")]) == 0
        assert {s.ref.attempt_id: s for s in read_attempts(tmp_path / "a")} == summaries

        await client.rewind(pb.RewindRequest(step=0, lineage_token="l"))
        summaries = {s.ref.attempt_id: s for s in await client.list_attempts()}
        assert summaries[first.attempt_id].group_state == "ready"
        assert not summaries[first.attempt_id].HasField("trained")


def test_attempts_of_no_ledger_are_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--ledger", str(tmp_path / "none.db"), "--out", str(tmp_path / "a")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot list the attempts of")
    assert list(tmp_path.iterdir()) == []
