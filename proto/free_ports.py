"""Loopback ports for servers that will listen a little later, and again after a restart.

A port that the kernel gives out (port 0) lies in the range from which it also numbers outgoing
connections: between choosing it and listening, which takes an engine half a minute, any
connection of this machine may take it. Ports outside that range are taken by servers alone.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10000
_LAST = 65535
_MAX_TRIES = 1000


def free_ports(num: int) -> list[int]:
    """`num` different TCP ports on 127.0.0.1 that are free now, outside the range of connections.

    Raises:
      OSError: none was found free, or the descriptors are used up.
    """
    choice = random.SystemRandom()
    candidates = [p for p in range(_FIRST, _LAST + 1) if p not in _connection_ports()]
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for _ in range(_MAX_TRIES):
            if len(found) == num:
                return found
            probe = stack.enter_context(socket.socket())
            port = choice.choice(candidates) if candidates else 0
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(int(probe.getsockname()[1]))
    raise OSError(f"found {len(found)} of {num} free loopback ports in {_MAX_TRIES} tries")


def _connection_ports() -> range:
    try:
        low, high = (int(part) for part in _RANGE.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(low, high + 1)
