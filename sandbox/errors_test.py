"""Every row of the error table, through a real server and client."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from proto import sandbox_pb2 as pb
from proto import sandbox_pb2_grpc, serving
from sandbox import client, errors, server


class FailingServicer(sandbox_pb2_grpc.SandboxBrokerServicer):
    """Fails GetStatus with a given error."""

    error: errors.SandboxError

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusReply:
        await server._abort(context, self.error)


@pytest.mark.parametrize("error", errors.ERRORS, ids=lambda error: error.__name__)
async def test_a_class_arrives_as_itself(error: type[errors.SandboxError]) -> None:
    servicer = FailingServicer()
    servicer.error = error("what went wrong")
    running = serving.make_server(
        serving.ServingConfig(),
        lambda s: sandbox_pb2_grpc.add_SandboxBrokerServicer_to_server(servicer, s),
        server.SERVICE_NAMES,
    )
    address = await running.start()
    try:
        async with serving.dial(address) as channel:
            with pytest.raises(errors.SandboxError, match="what went wrong") as caught:
                await client.SandboxClient(channel).status()
            assert type(caught.value) is error
    finally:
        await running.stop(0)


def test_a_status_without_a_name_maps_to_its_first_class() -> None:
    assert errors.error_class(grpc.StatusCode.UNAVAILABLE) is errors.BrokerAwayError
    assert errors.error_class(grpc.StatusCode.NOT_FOUND, "Nonsense") is errors.UnknownLeaseError
    assert errors.error_class(grpc.StatusCode.DATA_LOSS) is errors.SandboxError
