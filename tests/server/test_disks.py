"""Writers over a simulated disk whose calls fail: nothing accepted is lost silently, service goes on, and it heals.

DISK_HISTORIES sets how many seeded histories are played (default: 50 of each writer).
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.polling import eventually
from tests.helpers.simulated_disk import SimulatedDisk

from headway.core import files, logs
from headway.core.errors import ConfigError, UnavailableError
from headway.core.files import write_output
from headway.runtime.engine.protocol import OutputDelta
from headway.serving import journal
from headway.serving.journal import JournalWriter, RequestJournal

HISTORIES = int(os.environ.get("DISK_HISTORIES", "50"))


def delta(token: int) -> OutputDelta:
    return OutputDelta(id="x", tokens=(token,))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_RETRY_S", 0.002)
    monkeypatch.setattr(journal, "_SYNC_S", 0.0)
    monkeypatch.setattr(journal, "_ROOM_BYTES", 64)


async def play(seed: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """One history of a journal: requests come, have output and end while calls fail; then a crash, or an end."""
    dice = random.Random(seed)
    disk = SimulatedDisk(seed, short=0.2)
    patch.setattr(files, "os", disk)
    writer = JournalWriter(RequestJournal(folder), "here")
    disk.fail = dice.choice([0.0, 0.05, 0.3])
    # Accepted requests that have not ended, with the output that was sent.
    alive: dict[int, list[int]] = {}
    # Of these some output could not be recorded: it is computed again from there.
    cut: set[int] = set()
    for step in range(dice.randrange(4, 25)):
        verb = dice.choice(["accept", "accept", "write", "write", "write", "end", "full", "free"])
        if verb in ("full", "free"):
            disk.full = verb == "full"
        elif verb == "accept":
            try:
                number = await writer.accept(f"r{step % 3}", b"job", [b"\0\0\0\0"], "", f"hw-{step}")
            except UnavailableError as error:
                assert "here" in str(error)  # noqa: PT017 - what refuses says where
                continue
            alive[number] = []
        elif alive:
            number = dice.choice(list(alive))
            if verb == "write":
                # Returns whatever the disk does: the answer goes on.
                await writer.write_output(number, 0, delta(step))
                alive[number].append(step)
                cut |= writer._given_up
            else:
                writer.end(number)
                del alive[number]
    crashed = dice.random() < 0.5 and not disk.full
    disk.full = False
    disk.fail = 0.0
    if not crashed:
        # The disk is well again: so is the journal, and takes what comes. One end or sync may still fail before.
        while True:
            await eventually(lambda: writer.problem is None and not writer._writer._work_queue.qsize())
            try:
                alive[await writer.accept("last", b"job", [b""], "", "hw-last")] = []
                break
            except UnavailableError:
                continue
    writer.close()
    if crashed:
        for path in folder.glob("request-*"):
            disk.crash(str(path))
    again = RequestJournal(folder)
    again.close()
    # Accepted means on the disk: a crash takes at most output, from a request's end backwards, and ends.
    assert alive.keys() <= again.unfinished.keys(), f"seed {seed}: {alive.keys() - again.unfinished.keys()} are lost"
    for number, tokens in alive.items():
        found = [token for each in again.unfinished[number].outputs for one in each for token in one.tokens]
        assert found == (tokens[: len(found)] if crashed or number in cut else tokens), f"seed {seed}"
    assert crashed or alive.keys() == again.unfinished.keys(), f"seed {seed}: ended requests came back"


@pytest.mark.usefixtures("impatient")
def test_no_history_of_a_journal_loses_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for seed in range(HISTORIES):
        with tempfile.TemporaryDirectory(dir=shared) as name, monkeypatch.context() as patch:
            asyncio.run(play(seed, Path(name), patch))


def test_no_history_of_an_event_log_ends_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_KEPT", 400)
    monkeypatch.setattr(logs, "_BUFFER_BYTES", 200)
    for seed in range(HISTORIES):
        dice, disk = random.Random(seed), SimulatedDisk(seed, fail=0.1, short=0.3)
        with tempfile.TemporaryDirectory() as name, monkeypatch.context() as patch:
            sink = logs.LogSink(f"{name}/log")
            patch.setattr(logs, "os", disk)
            count = dice.randrange(5, 80)
            for number in range(count):
                disk.full = dice.random() < (0.9 if disk.full else 0.05)
                sink(dice.choice(["batch", "add"]), {"number": number})
                assert not disk.full or sink.lines.problem is None or "cannot be written" in sink.lines.problem
            disk.full, disk.fail = False, 0.0
            sink.lines.flush()
            assert sink.lines.problem is None
            del sink
            events = [msgspec.json.decode(line) for line in Path(name, "log").read_bytes().splitlines()]
        seen = 0
        for event in events:
            # Each line is there, or counted in its place.
            if event["event"] == "missing":
                seen += event["lines"]
            else:
                assert event["number"] == seen
                seen += 1
        assert seen == count


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    write_output(file, b"earlier")

    def full(self: Path, data: Any) -> int:
        with open(self, "wb") as half:
            half.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Path, "write_bytes", full)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"report.json: No space left on device"):
        write_output(file, b"a new one")
    assert file.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [file]
