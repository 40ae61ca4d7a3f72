"""Safe by default: who may reach the server."""

from __future__ import annotations

import ipaddress

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
