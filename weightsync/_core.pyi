"""Types of the native core; core/*.h state its behaviour."""

import enum
from array import array
from collections.abc import Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview | array[int]

MAX_RECEIVERS: int
MAX_BUFFERS: int

class ReceiverState(enum.Enum):
    ABSENT = 0
    ATTACHED = 1
    FAILED = 2
    VERIFIED = 3

class _Sender:
    def send(self, pieces: Buffer, label: str, timeout_s: float, owner: object = None) -> None: ...
    def finish(self, timeout_s: float) -> None: ...
    def drop(self, receiver: int, reason: str) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def state(self, receiver: int) -> ReceiverState: ...
    def error(self, receiver: int) -> str: ...
    def num_consumed(self, receiver: int) -> int: ...
    def digest(self, receiver: int) -> int: ...
    def was_touched(self, receiver: int) -> bool: ...

class _Receiver:
    def next(self, label: str, timeout_s: float) -> memoryview: ...
    def release(self) -> None: ...
    def verified(self, digest: int = 0) -> None: ...
    def fail(self, reason: str) -> None: ...

class RingSender(_Sender):
    def __init__(
        self,
        *,
        name: str,
        epoch: int,
        num_receivers: int,
        num_buffers: int,
        buffer_bytes: int,
        with_checksums: bool,
    ) -> None: ...
    @property
    def name(self) -> str: ...

class RingReceiver(_Receiver):
    def __init__(self, *, name: str, epoch: int, index: int) -> None: ...

class TcpSender(_Sender):
    def __init__(
        self,
        *,
        host: str,
        token: str,
        epoch: int,
        num_receivers: int,
        fan_out: int,
        num_buffers: int,
        buffer_bytes: int,
        with_checksums: bool,
        stall_timeout_s: float,
        with_local_sockets: bool = True,
    ) -> None: ...
    @property
    def port(self) -> int: ...
    @property
    def num_bytes_sent(self) -> int: ...

class TcpReceiver(_Receiver):
    def __init__(
        self, *, host: str, port: int, token: str, epoch: int, index: int, timeout_s: float
    ) -> None: ...

class RcclApi:
    def __init__(self, *, library: str = "", runtime: str = "") -> None: ...
    @property
    def version(self) -> int: ...
    def unique_id(self) -> bytes: ...

class RcclGroup:
    def __init__(
        self,
        api: RcclApi,
        *,
        unique_id: bytes,
        rank: int,
        world: int,
        device: int,
        bucket_bytes: int,
        num_buffers: int,
        with_checksums: bool,
        timeout_s: float,
    ) -> None: ...
    def agree(self, digest: bytes, timeout_s: float) -> None: ...
    def broadcast(
        self, buckets: Sequence[tuple[Buffer, int, str]], version: int, timeout_s: float
    ) -> list[tuple[int, float, float]]: ...
    def abort(self) -> None: ...

def pack(pieces: Buffer, bucket: Buffer, with_checksum: bool) -> tuple[int, int]: ...
def unpack(bucket: Buffer, pieces: Buffer) -> None: ...
def checksum(data: Buffer) -> int: ...
def sweep(prefix: str) -> int: ...
