"""Chooses the loopback ports of a run, once, so that a restarted process comes back where it was."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from launch.errors import UsageError
from proto.free_ports import free_ports


def choose_ports(names: Sequence[str], base_port: int) -> dict[str, int]:
    """A port for each name: base_port, base_port + 1, ... or free ones when base_port is 0.

    Raises UsageError naming the port and its process when one is taken.
    """
    if base_port == 0:
        return dict(zip(names, free_ports(len(names)), strict=True))
    ports = {name: base_port + index for index, name in enumerate(names)}
    if base_port + len(names) > 65536:
        raise UsageError(
            f"{len(names)} processes want ports from {base_port} on, which end at 65535: set "
            "--run.base_port to a lower base (0 takes free ports)"
        )
    for name, port in ports.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise UsageError(
                    f"port {port} for {name} is in use: end what listens there, or set "
                    "--run.base_port to another base (0 takes free ports)"
                ) from error
    return ports
