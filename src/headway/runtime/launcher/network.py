"""Addresses of hosts (IPv4): by which address and interface this host reaches another. No torch."""

from __future__ import annotations

import fcntl
import socket
import struct

from headway.core.errors import ConfigError

_ANY_PORT = 9
_SIOCGIFADDR = 0x8915


def address_towards(address: str) -> str:
    """This host's own address on the way to `address`, by its routes; nothing is sent. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
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
