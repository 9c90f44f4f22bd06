"""The status table, row by row over a real server, and the sequences file."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest

from proto import rollout_pb2 as pb
from proto import rollout_pb2_grpc as pb_grpc
from proto import trajectory_pb2 as tpb
from rollout.client import CorruptStoreError, RolloutClient, read_sequences, write_sequences
from rollout.errors import STATUS_CODES, CapExceededError, RolloutError, error_from_status
from rollout.servicer import RolloutServicer


class _Raising:
    """A manager whose every call fails with one error."""

    def __init__(self, error: RolloutError) -> None:
        self._error = error

    def set_admission(self, *_args: object, **_settings: object) -> None:
        raise self._error


@pytest.mark.parametrize("cls", list(STATUS_CODES), ids=lambda cls: cls.__name__)
async def test_each_row_of_the_table_crosses_the_wire(cls: type[RolloutError]) -> None:
    error = CapExceededError("no", "max_turns") if cls is CapExceededError else cls("no")
    server = grpc.aio.server()
    pb_grpc.add_RolloutManagerServicer_to_server(
        RolloutServicer(_Raising(error)),  # type: ignore[arg-type]
        server,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = RolloutClient(channel)
        with pytest.raises(RolloutError) as caught:
            await client.set_admission(pb.SetAdmissionRequest(open=True))
    assert type(caught.value) is cls
    if isinstance(caught.value, CapExceededError):
        assert caught.value.cap == "max_turns"
    await server.stop(0)


def test_codes_outside_the_table_are_plain_errors() -> None:
    assert type(error_from_status(grpc.StatusCode.ABORTED, "x")) is RolloutError
    assert len(set(STATUS_CODES.values())) == len(STATUS_CODES)


def test_sequences_file_reads_back_and_refuses_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.sequences"
    sequences = [tpb.TokenSequence(attempt_id=str(i), token_ids=bytes(4 * i)) for i in range(3)]
    assert write_sequences(path, sequences) == 3
    assert list(read_sequences(path)) == sequences
    assert [p.name for p in tmp_path.iterdir()] == ["x.sequences"]
    whole = path.read_bytes()
    for cut in (len(whole) - 1, 8 + 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptStoreError):
            list(read_sequences(path))
    path.write_bytes(b"something else")
    with pytest.raises(CorruptStoreError):
        list(read_sequences(path))
