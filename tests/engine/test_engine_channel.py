"""The line to an engine elsewhere: it is cut when its own peer goes, and by nothing that others do at its ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from tests.helpers.polling import run_ready_tasks

from headway.runtime.engine.process import EngineChannel
from headway.runtime.engine.protocol import EngineStats, IterationOutputs
from headway.runtime.launcher.processes import guard_client, guard_server, new_token

TOKEN = new_token()


class Line:
    """One end, its ports, and peers that come to the first of them."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.ports: list[int] = []
        self.peers: list[zmq.Socket[Any]] = []
        self.context = context
        self.line = EngineChannel(10.0, self._bind)

    def _bind(self, *sockets: zmq.Socket[Any]) -> None:
        for one in sockets:
            guard_server(one, TOKEN)
            self.ports.append(one.bind_to_random_port("tcp://127.0.0.1"))

    def peer(self, token: str | None) -> zmq.Socket[Any]:
        peer: zmq.Socket[Any] = self.context.socket(zmq.PAIR)
        peer.linger = 0
        peer.setsockopt(zmq.RECONNECT_IVL, -1)
        if token is not None:
            guard_client(peer, token)
        peer.connect(f"tcp://127.0.0.1:{self.ports[0]}")
        self.peers.append(peer)
        return peer

    async def cut_within(self, seconds: float) -> bool:
        """Looked at all the time."""
        for _ in range(int(seconds / 0.02)):
            if self.line.disconnected:
                return True
            await asyncio.sleep(0.02)
        return False

    async def strangers(self) -> None:
        """A port scan, a probe that speaks HTTP, and peers without the key."""
        for port in self.ports:
            for words in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(words)
                    assert not await self.cut_within(0.1)
        for token in (None, new_token()):
            peer = self.peer(token)
            assert not await self.cut_within(0.1)
            peer.close()
        assert not await self.cut_within(0.2)


@contextmanager
def opened() -> Iterator[Line]:
    context: zmq.Context[Any] = zmq.Context()
    made = Line(context)
    try:
        yield made
    finally:
        made.line.close()
        for peer in made.peers:
            peer.close()
        context.term()


def said(running: int) -> bytes:
    return msgspec.msgpack.encode(IterationOutputs(stats=EngineStats(running=running)))


async def heard(line: Line) -> int:
    message = await asyncio.wait_for(line.line.receive(), 5)
    assert isinstance(message, IterationOutputs)
    assert message.stats is not None
    return message.stats.running


async def test_strangers_that_connect_and_leave_cut_nothing() -> None:
    with opened() as line:
        await line.strangers()
        peer = line.peer(TOKEN)
        peer.send(said(1))
        assert await heard(line) == 1
        await line.strangers()
        peer.send(said(2))
        assert await heard(line) == 2
        line.line.send([b"to it"])
        assert await asyncio.to_thread(peer.recv) == b"to it"


@pytest.mark.parametrize("looked", [True, False])
async def test_the_end_of_its_peer_is_a_cut_and_what_came_before_can_still_be_read(looked: bool) -> None:
    """Even where nobody looked while it was there, once it has said a word."""

    with opened() as line:
        peer = line.peer(TOKEN)
        peer.send(said(1))
        assert await heard(line) == 1
        peer.send(said(2))
        if looked:
            assert not await line.cut_within(0.2)
        else:
            await asyncio.sleep(0.2)
        peer.close()
        assert await line.cut_within(5.0)
        assert await heard(line) == 2
        assert line.line.disconnected
        line.line.close()
        assert line.line.disconnected, "it stays"


async def test_polling_does_not_keep_messages_from_waiting_receivers() -> None:
    with opened() as line:
        peer = line.peer(TOKEN)
        for i in range(200):
            waits = asyncio.create_task(heard(line))
            await run_ready_tasks(1)
            peer.send(said(i))
            while not waits.done():
                assert not line.line.disconnected
                await run_ready_tasks(1)
            assert waits.result() == i
