"""The server's listening address; one that is reachable from outside needs an API key."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

from headway.core.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether only this host can connect to the address. Names other than localhost count as reachable."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, api_key: str | None, force: bool = False) -> None:
    """Raise ConfigError for an address that other hosts can reach when there is no API key.

    Called before the socket is opened. force: the operator's assurance that a gateway or firewall limits access.
    """
    if is_loopback(host) or api_key or force:
        return
    raise ConfigError(
        f"refusing to listen on {host!r} without an API key: anyone who can reach this machine could use the model. "
        "Set an API key, listen on 127.0.0.1, or give --allow-public if a gateway in front checks access."
    )


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind the port at every address of `host`. Called before the model is loaded. Raises ConfigError.

    The sockets do not listen yet: connections are refused until `run.serve`. Port 0: a free port at each address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host!r}: it is no address, nor a name that can be resolved") from error
    taken: list[socket.socket] = []
    refused: OSError | None = None
    # dict.fromkeys: resolvers may return an address twice.
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            taken.append(_bound(socket.socket(family, kind, protocol), address))
        except OSError as error:
            refused = error
            # A name may resolve to addresses that this host lacks (IPv6 off): those are skipped.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    else:
        if taken:
            return taken
    assert refused is not None
    release(taken)
    raise cannot_listen(host, port, refused) from refused


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Make the error for an address that the system refused to bind."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host} is in use: end the server there, or choose another with --port")
    why = os.strerror(error.errno) if error.errno is not None else str(error)
    return ConfigError(f"cannot listen on port {port} of {host}: {why}")


def url(host: str, bound: socket.socket) -> str:
    """Return the URL of a bound socket under the name or address `host`."""
    port = bound.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def release(sockets: Sequence[socket.socket]) -> None:
    """Close the sockets. Idempotent."""
    for each in sockets:
        each.close()


def _bound(made: socket.socket, address: object) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            # Otherwise the IPv6 wildcard takes the port on IPv4 too, in conflict with the socket bound there.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)  # type: ignore[arg-type]
    except BaseException:
        made.close()
        raise
    return made
