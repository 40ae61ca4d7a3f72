"""Addresses of hosts (IPv4): where node 0 listens, and by which interface another host gets there. No torch."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import NamedTuple

from headway.core.errors import ConfigError

DEFAULT_PORT = 29400
"""Where hosts meet when --rdzv-endpoint names no port; torchrun's."""

_SIOCGIFADDR = 0x8915


class HostEndpoint(NamedTuple):
    """Where node 0 waits for the others: a name or an address that every host can resolve."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> HostEndpoint:
    """HOST or HOST:PORT. Raises ConfigError for anything else."""
    host, colon, port = text.strip().partition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0 if colon else DEFAULT_PORT
    if not host or ":" in port or not 1 <= number <= 65535:
        raise ConfigError(f"{text!r} is not HOST:PORT with an IPv4 address or a name, and a port from 1 to 65535")
    return HostEndpoint(host, number)


def resolve(host: str) -> str:
    """The IPv4 address of a name. Raises ConfigError."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the host {host!r} has no IPv4 address that this one knows ({error})") from error


def address_towards(address: str) -> str:
    """This host's own address on the way to `address`, by its routes; nothing is sent. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, DEFAULT_PORT))
        except OSError as error:
            raise ConfigError(f"this host has no route to {address} ({error.strerror})") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None when no interface does."""
    if address.startswith("127."):
        address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
