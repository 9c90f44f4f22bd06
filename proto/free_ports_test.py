"""Ports that no outgoing connection can take."""

from __future__ import annotations

import socket

import pytest

from proto import free_ports


def test_ports_are_free_different_and_outside_the_range_of_connections():
    ports = free_ports.free_ports(20)
    assert len(set(ports)) == 20
    low, high = (int(part) for part in free_ports._RANGE.read_text().split())
    assert not [port for port in ports if low <= port <= high]
    with socket.create_server(("127.0.0.1", ports[0])) as server:
        assert server.getsockname()[1] == ports[0]


def test_where_connections_may_take_every_port_the_kernel_chooses(tmp_path, monkeypatch):
    wide = tmp_path / "range"
    wide.write_text("1024\t65535\n")
    monkeypatch.setattr(free_ports, "_RANGE", wide)
    (port,) = free_ports.free_ports(1)
    assert port > 0


def test_taken_ports_are_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(free_ports, "_FIRST", port)
        monkeypatch.setattr(free_ports, "_LAST", port)
        monkeypatch.setattr(free_ports, "_connection_ports", lambda: range(0))
        with pytest.raises(OSError, match="found 0 of 1 free loopback ports"):
            free_ports.free_ports(1)
