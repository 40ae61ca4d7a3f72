"""Settings of the HTTP server, and its listening address: one that is reachable from outside needs an API key.

Only those of `EndpointSettings` are flags of `headway serve`.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import parsed_by
from headway.core.settings import (
    ByteSize,
    Flag,
    Seconds,
    SettingsModel,
    Text,
    TextList,
    WholeNumber,
    text_list,
)


def _model_names(value: Any) -> tuple[str, ...]:
    names = text_list(value)
    if not all(name.strip() for name in names):
        raise ConfigError("a name is empty: give one, or leave the setting out")
    return names


ModelNames = Annotated[tuple[str, ...], parsed_by(_model_names)]


class EndpointSettings(SettingsModel):
    """What an operator may set about the HTTP server. Times in seconds, sizes in bytes."""

    served_model_name: ModelNames = Field(
        (),
        description="names that requests may give as 'model'; the first is shown. Default: the engine's",
        json_schema_extra={"nargs": "+"},  # --served-model-name a b, as in vLLM; a,b too
    )
    host: Text = Field("127.0.0.1", description="address to listen on")
    port: WholeNumber = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_key: Text | None = Field(
        None,
        description="clients of /v1, /tokenize and /detokenize must send it as a Bearer token; several: a,b",
    )
    admin_key: Text | None = Field(
        None, description="key that /v1/cluster needs in place of a client's; it also reads and deletes all requests"
    )
    allowed_hosts: TextList = Field(
        (),
        description="host names besides localhost by which clients without a key may address the server (header Host)",
    )
    allowed_origins: TextList = Field(
        (), description="origins whose web pages may call the server (CORS); * for all. Default: none"
    )
    max_body_bytes: ByteSize = Field(64 << 20, gt=0, description="largest request body, in bytes; above it: 413")
    request_timeout_s: Seconds | None = Field(
        None, gt=0, description="seconds after which a request is ended; a request may ask for less, not for more"
    )
    drain_timeout_s: Seconds = Field(
        300.0, ge=0, description="seconds that a SIGTERM waits for accepted requests to finish"
    )
    journal: Text | None = Field(
        None,
        description="folder of a journal of accepted requests, which a restarted server finishes; it holds prompts",
    )
    chat_template: Text | None = Field(
        None,
        description="file of a Jinja chat template, or its text in one line, instead of the model's own",
        json_schema_extra={"metavar": "FILE"},
    )
    live_page: Flag = Field(True, description="serve the live page at /ui, with its data and explanations under /v1")
    otlp_traces_endpoint: Text | None = Field(
        None,
        description="send an OpenTelemetry span of each request there (OTLP, e.g. http://localhost:4318/v1/traces)",
        json_schema_extra={"metavar": "URL"},
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text (key=value) or json (one object a line)")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the keys of clients; none: no key is asked for."""
        return tuple(key.strip() for key in (self.api_key or "").split(",") if key.strip())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.api_key is not None and not self.api_keys:
            raise ValueError("api_key must not be empty; leave it out to serve without one")
        if self.admin_key is not None and (not self.admin_key.strip() or self.admin_key in self.api_keys):
            raise ValueError("admin_key must not be empty, nor a client's key")
        return self


class ServerSettings(EndpointSettings):
    """Settings of one server process, with what only the program sets.

    The limits protect a server from clients that are slow, many or wrong. They are constants, since their values hold
    on any machine; a test sets others.
    """

    start_engine: bool = Field(True, description="start the engine with the server")
    event_log: str | None = Field(None, description="event log of the only engine, for explanations")
    max_queued_requests: int = Field(
        0, description="requests that may wait in the engine before new ones get 429; 0: the engine decides"
    )

    # -- bodies and connections -----------------------------------------------------------------------------------

    max_buffered_bytes: ByteSize = Field(
        1 << 30, gt=0, description="bodies being read or parsed at one time, in all; above it: 429. 16 of the largest"
    )
    body_timeout_s: Seconds = Field(60.0, gt=0, description="a body must have arrived: 64 MiB at 1 MB/s")
    header_timeout_s: Seconds = Field(10.0, gt=0, description="a header must have arrived: one round trip is enough")
    idle_timeout_s: Seconds = Field(75.0, gt=0, description="between two requests: longer than a load balancer's 60 s")
    max_connections: WholeNumber = Field(
        4096, gt=0, description="connections at one time, fewer where the system's limit of open files is lower"
    )
    max_concurrent_requests: WholeNumber = Field(
        1024, gt=0, description="generation requests in flight at one time, the queue of one engine; above it: 429"
    )
    max_instances: WholeNumber = Field(
        64, gt=0, description="instances of a cluster with those that join while it serves; above it: 429"
    )
    max_prompts: WholeNumber = Field(
        64, gt=0, description="prompts of one request, each counted `n` times: a request holds no more of the queue"
    )
    worker_threads: WholeNumber = Field(
        2, gt=0, description="threads for bodies from 2 to 64 KiB; larger ones have processes of their own"
    )
    tokenizer_memory: ByteSize = Field(
        1 << 30, gt=0, description="memory for tokenising texts that cannot be cut into pieces, in each process"
    )

    # -- streams --------------------------------------------------------------------------------------------------

    keep_alive_s: Seconds = Field(
        10.0, gt=0, description="silence in a stream after which a ': keep-alive' comment is sent: proxies wait 60 s"
    )
    slow_client_timeout_s: Seconds = Field(
        30.0, gt=0, description="how long a client may take nothing of its stream before the request is aborted"
    )

    # -- latency that clients may ask for: beyond it a target is taken as the limit -----------------------------------

    slo_min_ttft_s: Seconds = Field(0.05, gt=0, description="below it every request would be late")
    slo_max_ttft_s: Seconds = Field(3600.0, description="above it a request would never be urgent")
    slo_min_tbt_s: Seconds = Field(0.005, gt=0, description="below it prompts would get no time beside decodes")
    slo_max_tbt_s: Seconds = Field(60.0, description="above it a stream counts as dead")

    # -- the journal, the log ---------------------------------------------------------------------------------------

    journal_keep_s: Seconds = Field(
        3600.0, gt=0, description="how long the answers of requests that were taken up again are kept"
    )
    status_every_s: Seconds = Field(10.0, ge=0, description="between status lines while there is work; 0: none")


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
            taken.append(_bound_socket(socket.socket(family, kind, protocol), address))
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


def _bound_socket(made: socket.socket, address: object) -> socket.socket:
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
