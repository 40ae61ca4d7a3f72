"""The address that the server listens on: not reachable from outside without an API key."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

from headway.core.errors import ConfigError


def is_loopback(host: str) -> bool:
    """True when only this machine can connect to `host`. Names other than localhost count as reachable from outside."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, api_key: str | None, force: bool = False) -> None:
    """Called before the socket is opened. Raises ConfigError when others could connect without any key.

    `force` is the operator's own word that something else (a gateway, a firewall) keeps strangers out.
    """
    if is_loopback(host) or api_key or force:
        return
    raise ConfigError(
        f"refusing to listen on {host!r} without an API key: anyone who can reach this machine could use the model. "
        "Set an API key, listen on 127.0.0.1, or force it if a gateway in front checks access."
    )


def bind(host: str, port: int) -> list[socket.socket]:
    """Take the port at every address of `host`: called before anything is loaded. Raises ConfigError, in one line.

    The sockets do not listen yet: connections are refused until `run.serve` does. Port 0: a free one at each address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host!r}: it is no address, nor a name that can be resolved") from error
    taken: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            taken.append(_bound(socket.socket(family, kind, protocol), address))
        except OSError as error:
            refused = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    else:
        if taken:
            return taken
    assert refused is not None
    release(taken)
    raise cannot_listen(host, port, refused) from refused


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """The system's refusal, in words."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host} is in use: end the server there, or choose another with --port")
    why = os.strerror(error.errno) if error.errno is not None else str(error)
    return ConfigError(f"cannot listen on port {port} of {host}: {why}")


def url(host: str, bound: socket.socket) -> str:
    """Where a bound socket is reached by those who call this machine so."""
    port = bound.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def release(sockets: Sequence[socket.socket]) -> None:
    """Close them. Harmless when repeated."""
    for each in sockets:
        each.close()


def _bound(made: socket.socket, address: object) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)  # type: ignore[arg-type]
    except BaseException:
        made.close()
        raise
    return made
