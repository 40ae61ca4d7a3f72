"""Connections without a request: time-outs, the limit and its reserve, the log, vanished clients."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.polling import until

from headway.serving import transport
from headway.serving.settings import ServerSettings
from headway.serving.transport import ConnectionTable

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
IDLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def opened(url: str, data: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    made = socket.create_connection((parts.hostname, parts.port or 80), timeout=10)
    made.sendall(data)
    return made


def said(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    connection.close()
    return data


def posted(prompt: list[int], stream: bool = False, more: bytes = b"") -> bytes:
    body = json.dumps({"model": "fake-model", "prompt": prompt, "max_tokens": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + more


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_connection_that_sends_no_whole_header_is_closed(live: Any, engine: FakeEngine, sent: bytes) -> None:
    with live(engine, header_timeout_s=0.1) as url:
        assert said(opened(url, sent)) == b""
        assert b"200 OK" in said(opened(url, HEALTH))


def test_bytes_that_trickle_do_not_extend_the_time(live: Any, engine: FakeEngine) -> None:
    with live(engine, header_timeout_s=0.2) as url:
        slow = opened(url)
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(100):
                slow.sendall(b"G")
                slow.settimeout(0.05)
                try:
                    assert slow.recv(1) == b""
                    raise ConnectionError("closed")
                except TimeoutError:
                    continue
        slow.close()


def test_a_body_that_no_one_reads_does_not_keep_the_connection(live: Any, engine: FakeEngine) -> None:
    with live(engine, header_timeout_s=0.1, idle_timeout_s=0.1) as url:
        unread = opened(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx")
        assert unread.recv(4096).startswith(b"HTTP/1.1 200")
        unread.sendall(b"y")
        assert b"HTTP/1.1" not in said(unread)


def test_a_second_request_on_a_connection_has_the_time_of_a_first(live: Any, engine: FakeEngine) -> None:
    with live(engine, header_timeout_s=0.1, idle_timeout_s=60) as url:
        kept = opened(url, IDLE)
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /hea")
        assert b"200" not in said(kept)


def test_idle_connections_make_place_for_new_ones(live: Any, engine: FakeEngine) -> None:
    with live(engine, max_connections=4) as url:
        idle = [opened(url) for _ in range(4)]
        for _ in range(3):
            assert b"200 OK" in said(opened(url, HEALTH))
        # The one that waited longest.
        assert said(idle[0]) == b""
        for each in idle[1:]:
            each.close()


def test_health_is_answered_while_all_connections_are_busy(live: Any, engine: FakeEngine) -> None:
    engine.hold = asyncio.Event()
    with live(engine, max_connections=3) as url:
        busy = [opened(url, posted([5])) for _ in range(3)]
        until(lambda: len(engine.submits) == 3, 10, "not submitted")
        assert b"200 OK" in said(opened(url, HEALTH))
        refused = said(opened(url, posted([6])))
        assert b"503" in refused.split(b"\r\n")[0]
        assert b"too many connections" in refused
        for each in busy:
            each.close()
        until(lambda: len(engine.aborted) == 3, 10, "not aborted")
        assert b"200 OK" in said(opened(url, HEALTH))


def test_refused_connections_are_one_line_of_the_log(
    live: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hold = asyncio.Event()
    monkeypatch.setattr(transport, "RESERVE", 0)
    caplog.set_level(logging.DEBUG)
    with live(engine, max_connections=1) as url:
        busy = opened(url, posted([5]))
        until(lambda: engine.submits, 10, "not submitted")
        caplog.clear()
        for _ in range(50):
            assert said(opened(url)) == b""
        lines = [record.getMessage() for record in caplog.records if "connections" in record.getMessage()]
        busy.close()
    assert lines == ["too many connections"]


def test_malformed_requests_leave_no_warning(live: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with live(engine) as url:
        for _ in range(5):
            assert b"400" in said(opened(url, b"\x00\x01 nonsense\r\n\r\n"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_failed_accepts_are_counted_and_not_each_logged(caplog: pytest.LogCaptureFixture) -> None:
    table = ConnectionTable(ServerSettings())
    loop = asyncio.new_event_loop()
    problem = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    for _ in range(1000):
        table.on_loop_error(loop, problem)
    loop.close()
    assert [record.getMessage() for record in caplog.records] == ["too many connections"]


def test_the_limit_follows_that_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.resource, "getrlimit", lambda _: (256, 256))  # type: ignore[attr-defined]
    table = ConnectionTable(ServerSettings())
    assert 4 * table.backlog <= table.limit < 256 - table.backlog - transport.RESERVE
    monkeypatch.setattr(transport.resource, "getrlimit", lambda _: (10**6, 10**6))  # type: ignore[attr-defined]
    assert ConnectionTable(ServerSettings()).limit == ServerSettings().max_connections


@pytest.mark.parametrize("host", ["localhost", "elsewhere"])
@pytest.mark.parametrize("rest", [b"zz\r\n", b"f" * 40 + b"\r\n", b"5\r\nhello!\r\n"])
def test_a_broken_body_is_refused_once_and_leaves_no_traceback(
    live: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, host: str, rest: bytes
) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with live(engine, body_timeout_s=1.0) as url:
        text = said(opened(url, head + rest))
        assert b"200 OK" in said(opened(url, HEALTH))
    assert text.count(b"HTTP/1.1 4") == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_left_is_noticed_before_any_output(
    live: Any, engine: FakeEngine, stream: bool, reset: bool
) -> None:
    engine.hold = asyncio.Event()
    with live(engine, keep_alive_s=0.5) as url:
        gone = opened(url, posted([5, 6], stream))
        until(lambda: engine.submits, 10, "not submitted")
        if stream:
            assert gone.recv(4096).startswith(b"HTTP/1.1 200")
        if reset:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        until(lambda: engine.aborted, 10, "not aborted")
