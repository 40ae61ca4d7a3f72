"""The journal: what is written outlives its writer, whatever is torn off its end."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.core.request import TokenLogprobs
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.journal import JournalCopy, RequestJournal

PROMPTS = [b"\x01\x00\x00\x00\x02\x00\x00\x00", b"\x03\x00\x00\x00"]


def delta(*tokens: int) -> OutputDelta:
    return OutputDelta(id="x", tokens=tokens, logprobs=(TokenLogprobs(-0.5, ((3, -0.5),)),))


def compact(journal: RequestJournal) -> None:
    """Write the file anew, in one step."""
    copy = journal.copy_live()
    copy.write()
    journal.adopt(copy)


def left(folder: Path) -> dict[str, list[list[int]]]:
    """What a next server would find: tokens by request and prompt."""
    journal = RequestJournal(folder)
    journal.close()
    return {
        entry.accepted.id: [[t for one in said for t in one.tokens] for said in entry.outputs]
        for entry in journal.unfinished.values()
    }


def test_unfinished_requests_are_recovered_with_all_their_output(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path / "made" / "here")
    assert journal.unfinished == {}
    one, two = journal.accept("one", b"job 1", PROMPTS), journal.accept("two", b"job 2", [PROMPTS[0]])
    journal.write_output(one, 1, delta(7))
    journal.write_output(two, 0, delta(8))
    journal.write_output(one, 1, delta(9, 10))
    journal.end(two)
    journal.end(two)
    journal.write_output(two, 0, delta(11))
    journal.close()
    journal.close()
    again = RequestJournal(tmp_path / "made" / "here")
    (entry,) = again.unfinished.values()
    assert (entry.accepted.id, entry.accepted.job, list(entry.accepted.prompts)) == ("one", b"job 1", PROMPTS)
    assert entry.outputs == [[], [delta(7), delta(9, 10)]]
    three = again.accept("three", b"", [])
    assert three not in (one, two)
    again.end(one)
    again.end(three)
    again.close()
    assert left(tmp_path / "made" / "here") == {}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["tell", "end", "compact"])), max_size=25),
    torn=st.integers(0, 40),
)
def test_a_torn_end_costs_only_what_is_torn(steps: list[tuple[int, str]], torn: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = RequestJournal(folder)
        numbers = [journal.accept(f"r{i}", b"j", [PROMPTS[1]]) for i in range(4)]
        model: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
        states = [(os.path.getsize(folder / "requests.journal"), {k: list(v) for k, v in model.items()})]
        for count, (who, verb) in enumerate(steps):
            if verb == "tell" and f"r{who}" in model:
                journal.write_output(numbers[who], 0, delta(count))
                model[f"r{who}"].append(count)
            elif verb == "end":
                journal.end(numbers[who])
                model.pop(f"r{who}", None)
            elif verb == "compact":
                compact(journal)
                states.clear()
            states.append((os.path.getsize(folder / "requests.journal"), {k: list(v) for k, v in model.items()}))
        journal.close()
        path = folder / "requests.journal"
        size = max(states[0][0], path.stat().st_size - torn)
        os.truncate(path, size)
        # An end is marked in the request's first frame, which stands before what is torn.
        wanted = {name: said for name, said in [kept for at, kept in states if at <= size][-1].items() if name in model}
        assert left(folder) == {name: [tokens] for name, tokens in wanted.items()}
        assert left(folder) == {name: [tokens] for name, tokens in wanted.items()}


def written(folder: Path) -> list[int]:
    """Ends of the journal's frames: two headers, then r0 to r3 accepted, then 2 outputs of each in turn."""
    journal = RequestJournal(folder)
    path, ends = folder / "requests.journal", []
    numbers = []
    for i in range(4):
        numbers.append(journal.accept(f"r{i}", b"j" * 50, [PROMPTS[1]]))
        ends.append(path.stat().st_size)
    for token in range(2):
        for number in numbers:
            journal.write_output(number, 0, delta(token))
            ends.append(path.stat().st_size)
    journal.close()
    return ends


WHOLE = {f"r{i}": [[0, 1]] for i in range(4)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), length=st.integers(1, 9))
def test_a_damaged_record_costs_that_record_only(where: float, bit: int, length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "j"
        ends = written(folder)
        path = folder / "requests.journal"
        data = bytearray(path.read_bytes())
        at = int(where * len(data))
        damaged = range(at, min(len(data), at + (1 if length == 1 else length)))
        for place in damaged:
            data[place] ^= 1 << bit
        path.write_bytes(data)
        found = left(folder)
        # Frames that the damage touches: 0 to 3 are requests, 4 to 11 their outputs.
        hit = {i for i, (begin, end) in enumerate(itertools.pairwise(ends), 1) if {*damaged} & {*range(begin, end)}}
        if at < ends[0]:
            hit.add(0)
        for i in range(4):
            whole = [0, 1]
            allowed = [whole] if not hit & {i, i + 4, i + 8} else [whole, [0] if i + 8 in hit else [], []]
            assert found.get(f"r{i}", [[]])[0] in allowed
            if i not in hit:
                assert f"r{i}" in found
        if found != WHOLE:
            assert len(list(folder.glob("requests.damaged-*"))) == 1


def test_a_damaged_file_is_kept_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends = written(tmp_path / "j")
    path = tmp_path / "j" / "requests.journal"
    data = bytearray(path.read_bytes())
    data[ends[4] + 20] ^= 255
    path.write_bytes(data)
    assert left(tmp_path / "j") == {**WHOLE, "r1": [[]]}
    (kept,) = (tmp_path / "j").glob("requests.damaged-*")
    assert kept.read_bytes() == bytes(data)
    (line,) = caplog.records
    assert line.fields["places"] == 1  # type: ignore[attr-defined]
    assert line.fields["kept_as"] == kept.name  # type: ignore[attr-defined]
    # Read again: whole, and nothing else is kept.
    assert left(tmp_path / "j") == {**WHOLE, "r1": [[]]}
    assert len(list((tmp_path / "j").glob("requests.damaged-*"))) == 1


@pytest.mark.parametrize("lost", ["truncated", "damaged", "removed"])
def test_the_lock_file_may_be_damaged_too(tmp_path: Path, lost: str) -> None:
    written(tmp_path / "j")
    lock = tmp_path / "j" / "lock"
    if lost == "removed":
        lock.unlink()
    else:
        lock.write_bytes(b"" if lost == "truncated" else b"12345678")
    assert left(tmp_path / "j") == WHOLE


def test_a_prompt_that_holds_a_frame_is_no_frame(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    written(evil)
    frames = (evil / "requests.journal").read_bytes()
    journal = RequestJournal(tmp_path / "j")
    journal.accept("mine", b"", [frames])
    journal.close()
    path = tmp_path / "j" / "requests.journal"
    data = bytearray(path.read_bytes())
    data[-len(frames) - 20] ^= 255  # its own frame is damaged: what it holds is not read as frames
    path.write_bytes(data)
    assert left(tmp_path / "j") == {}


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: a write takes in what fits, the next one is an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_rewritten_stays_unchanged(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    one = journal.accept("one", b"", [PROMPTS[0]])
    for token in range(20):
        journal.write_output(one, 0, delta(token))
    size = (tmp_path / "requests.journal").stat().st_size
    with disk_of(size // 2), pytest.raises(OSError):
        compact(journal)
    assert sorted(os.listdir(tmp_path)) == ["lock", "requests.journal"]
    assert not [name for name in open_files() if "requests.new" in name]
    with disk_of(size + 3), pytest.raises(OSError):
        journal.write_output(one, 0, delta(99))
    journal.write_output(one, 0, delta(20))
    compact(journal)
    journal.write_output(one, 0, delta(21))
    journal.close()
    assert left(tmp_path) == {"one": [list(range(22))]}


def open_files() -> list[str]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed them is closed by now
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def test_the_file_does_not_grow_with_what_has_ended(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path, slack_bytes=10_000)
    pinned = journal.accept("pinned", b"", [PROMPTS[0]])
    journal.write_output(pinned, 0, delta(1))
    for i in range(200):
        number = journal.accept(f"r{i}", b"j" * 200, [bytes(400)])
        journal.write_output(number, 0, delta(2))
        journal.end(number)
        if journal.compaction_due:
            compact(journal)
        assert (tmp_path / "requests.journal").stat().st_size < 12_000
    journal.write_output(pinned, 0, delta(3))
    journal.close()
    assert left(tmp_path) == {"pinned": [[1, 3]]}


def test_a_journal_folder_has_one_server_and_private_permissions(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path / "j")
    with pytest.raises(ConfigError, match="another server writes to it"):
        RequestJournal(tmp_path / "j")
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "j" / "requests.journal").stat().st_mode) == 0o600
    journal.close()
    RequestJournal(tmp_path / "j").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--journal"):
        RequestJournal(tmp_path / "file" / "j")


def test_requests_of_another_model_are_not_mistaken_for_this_ones(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    journal.belongs_to("llama, vocabulary of 128")
    number = journal.accept("one", b"", [PROMPTS[0]])
    journal.close()
    journal = RequestJournal(tmp_path)
    journal.belongs_to("llama, vocabulary of 128")
    with pytest.raises(ConfigError, match=r"1 unfinished requests of llama.*qwen"):
        journal.belongs_to("qwen")
    journal.end(number)
    journal.belongs_to("qwen")
    journal.close()
    assert left(tmp_path) == {}


KILLED = """
import os, signal, sys
from pathlib import Path
from headway.serving.journal import RequestJournal
from headway.runtime.engine.protocol import OutputDelta
journal = RequestJournal(Path(sys.argv[1]))
number = journal.accept("one", b"job", [b"\\x01\\x00\\x00\\x00"])
for token in range(100):
    journal.write_output(number, 0, OutputDelta(id="x", tokens=(token,)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_has_written_all_that_it_reported(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert left(tmp_path) == {"one": [list(range(100))]}


def test_an_end_is_recorded_without_space_to_compact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told of it but the log, and it is not tried again at every end."""
    journal = RequestJournal(tmp_path, slack_bytes=1000)
    real, full, tries = JournalCopy.write, True, 0

    def write(self: JournalCopy) -> None:
        nonlocal tries
        tries += 1
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self)

    monkeypatch.setattr(JournalCopy, "write", write)

    def serve(requests: int) -> None:
        for i in range(requests):
            journal.end(journal.accept(str(i), b"", [b"\1" * 200]))
            if journal.compaction_due:
                try:
                    compact(journal)
                except OSError as error:
                    journal.copy_failed(error)

    stays = journal.accept("stays", b"", [PROMPTS[0]])
    journal.write_output(stays, 0, delta(5))
    serve(20)
    size = (tmp_path / "requests.journal").stat().st_size
    assert size > 4000
    assert 1 <= tries <= size // 1000
    assert "No space left" in caplog.text
    full = False
    serve(10)
    assert (tmp_path / "requests.journal").stat().st_size < 2500
    journal.close()
    assert left(tmp_path) == {"stays": [[5]]}


def test_a_full_disk_at_start_is_one_sentence(tmp_path: Path) -> None:
    RequestJournal(tmp_path / "j").close()
    with disk_of(8), pytest.raises(ConfigError, match="make room or give another folder"):
        RequestJournal(tmp_path / "j")
    RequestJournal(tmp_path / "j").close()


@pytest.mark.parametrize("name", ["", "lock", "requests.journal", "requests.new"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    if name:
        folder = tmp_path / "j"
        folder.mkdir(mode=0o700)
        target.write_text("of another")
        (folder / name).symlink_to(target)
    else:
        target.mkdir(mode=0o755)
        (tmp_path / "j").symlink_to(target)
    if name == "requests.new":  # a leftover: removed, not followed
        RequestJournal(tmp_path / "j").close()
    else:
        with pytest.raises(ConfigError, match="--journal"):
            RequestJournal(tmp_path / "j")
    if name:
        assert target.read_text() == "of another"
    else:
        assert stat.S_IMODE(target.stat().st_mode) == 0o755
        assert not list(target.iterdir())


def test_an_open_folder_is_closed_to_others_unless_it_holds_other_files(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir(mode=0o755)
    RequestJournal(tmp_path / "j").close()
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o700
    (tmp_path / "j" / "photo.png").write_text("")
    (tmp_path / "j").chmod(0o755)
    with pytest.raises(ConfigError, match=r"holds 'photo.png' besides"):
        RequestJournal(tmp_path / "j")
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["requests.journal", "lock"])
def test_a_pipe_in_place_of_a_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="--journal"):
        RequestJournal(folder)
