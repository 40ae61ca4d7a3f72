"""The journal's thread: nothing waits for the disk but the request at hand, and a full disk is survived."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.polling import eventually

from headway.core import files
from headway.runtime.engine.protocol import OutputDelta
from headway.serving import journal
from headway.serving.journal import JournalWriter, RequestJournal

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True}


class Disk:
    """What `files._write` does: writes, fails as on a full disk, or waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.free = threading.Event()
        self.free.set()
        real = files._write

        def write(file: int, data: bytes) -> None:
            assert self.free.wait(10)
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file, data)

        monkeypatch.setattr(files, "_write", write)
        monkeypatch.setattr(journal, "_RETRY_S", 0.01)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def left(folder: Path) -> dict[str, list[int]]:
    again = RequestJournal(folder)
    again.close()
    return {e.accepted.id: [t for d in e.outputs[0] for t in d.tokens] for e in again.unfinished.values()}


def delta(token: int) -> OutputDelta:
    return OutputDelta(id="x", tokens=(token,))


async def test_a_full_disk_refuses_new_requests_and_heals(
    connect: Any, engine: FakeEngine, tmp_path: Path, disk: Disk
) -> None:
    engine.gate = asyncio.Semaphore(1)
    async with connect(journal=str(tmp_path / "j")) as client:
        running = asyncio.create_task(client.post(PATH, json=BODY, headers={"x-request-id": "running"}))
        await eventually(lambda: engine.sent == 2)
        disk.full = True
        engine.gate.release()
        await eventually(lambda: client._transport.app.state.headway.journal.problem)
        refused = await client.post(PATH, json=BODY)
        assert refused.status_code == 503
        assert "disk" in refused.text
        assert str(tmp_path / "j") in refused.text
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "No space left on device" in ready.text
        assert (await client.get("/health")).status_code == 200
        # What was accepted goes on, and the end of it needs no room.
        for _ in range(4):
            engine.gate.release()
        answer = await running
        assert answer.json()["choices"][0]["token_ids"] == [5, 6, 7, 5, 6, 7]
        disk.full = False
        await eventually(lambda: client._transport.app.state.headway.journal.problem is None)
        assert (await client.get("/ready")).status_code == 200
        engine.gate = None
        assert (await client.post(PATH, json=BODY)).status_code == 200
    assert left(tmp_path / "j") == {}


async def test_an_end_on_a_full_disk_outlives_the_server(tmp_path: Path, disk: Disk) -> None:
    writer = JournalWriter(RequestJournal(tmp_path / "j"), "here")
    one = await writer.accept("one", b"", [b""], "")
    disk.full = True
    await writer.write_output(one, 0, delta(1))
    writer.end(one)
    writer.close()
    disk.full = False
    assert left(tmp_path / "j") == {}


async def test_a_request_whose_output_was_refused_is_computed_again_from_there(tmp_path: Path, disk: Disk) -> None:
    writer = JournalWriter(RequestJournal(tmp_path / "j"), "here")
    one = await writer.accept("one", b"", [b""], "")
    await writer.write_output(one, 0, delta(0))
    disk.full = True
    for token in range(1, 5):
        await writer.write_output(one, 0, delta(token))
    disk.full = False
    await eventually(lambda: writer.problem is None)
    await writer.write_output(one, 0, delta(5))
    writer.close()
    assert left(tmp_path / "j") == {"one": [0]}


async def test_a_slow_disk_stops_no_other_request(connect: Any, engine: FakeEngine, tmp_path: Path, disk: Disk) -> None:
    async with connect(journal=str(tmp_path / "j")) as client:
        disk.free.clear()
        slow = asyncio.create_task(client.post(PATH, json=BODY))
        try:
            await asyncio.sleep(0.02)
            async with asyncio.timeout(5):
                assert (await client.get("/health")).status_code == 200
            assert not slow.done()
        finally:
            disk.free.set()
        assert (await slow).status_code == 200


async def test_requests_that_come_together_are_recorded_together(tmp_path: Path, disk: Disk) -> None:
    writer = JournalWriter(RequestJournal(tmp_path / "j"), "here")
    disk.free.clear()
    accepted = [asyncio.create_task(writer.accept(f"r{i}", b"", [b""], "")) for i in range(40)]
    await asyncio.sleep(0.02)
    assert not any(each.done() for each in accepted)
    disk.free.set()
    assert len(set(await asyncio.gather(*accepted))) == 40
    writer.close()
    assert len(left(tmp_path / "j")) == 40


async def test_a_request_whose_client_left_while_it_was_recorded_is_not_computed_again(
    tmp_path: Path, disk: Disk
) -> None:
    writer = JournalWriter(RequestJournal(tmp_path / "j"), "here")
    disk.free.clear()
    leaving = [asyncio.create_task(writer.accept(f"r{i}", b"", [b""], "")) for i in range(3)]
    await asyncio.sleep(0.02)
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    disk.free.set()
    await writer.accept("stays", b"", [b""], "")
    await asyncio.sleep(0.05)
    writer.close()
    assert left(tmp_path / "j") == {"stays": []}
