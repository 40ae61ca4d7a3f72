"""The journal: what is written outlives its writer, whatever is torn off a file's end."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.core.request import TokenLogprobs
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.journal import RequestJournal

PROMPTS = [b"\x01\x00\x00\x00\x02\x00\x00\x00", b"\x03\x00\x00\x00"]


def delta(*tokens: int) -> OutputDelta:
    return OutputDelta(id="x", tokens=tokens, logprobs=(TokenLogprobs(-0.5, ((3, -0.5),)),))


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
    assert three != one
    again.end(one)
    again.end(three)
    again.close()
    assert left(tmp_path / "made" / "here") == {}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["tell", "tell", "end"])), max_size=25),
    torn=st.integers(0, 40),
)
def test_a_torn_end_costs_only_what_is_torn(steps: list[tuple[int, str]], torn: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = RequestJournal(folder)
        numbers = [journal.accept(f"r{i}", b"j", [PROMPTS[1]]) for i in range(4)]
        files = sorted(folder.glob("request-*"))
        alive: dict[int, list[int]] = {i: [] for i in range(4)}
        # Sizes of the first request's file with the output that it has by then.
        states = [(files[0].stat().st_size, 0)]
        for count, (who, verb) in enumerate(steps):
            if verb == "tell" and who in alive:
                journal.write_output(numbers[who], 0, delta(count))
                alive[who].append(count)
                if who == 0:
                    states.append((files[0].stat().st_size, len(alive[0])))
            elif verb == "end":
                journal.end(numbers[who])
                alive.pop(who, None)
        journal.close()
        if 0 in alive:
            size = max(states[0][0], files[0].stat().st_size - torn)
            os.truncate(files[0], size)
            del alive[0][max(kept for at, kept in states if at <= size) :]
        wanted = {f"r{i}": [tokens] for i, tokens in alive.items()}
        assert left(folder) == wanted
        assert left(folder) == wanted


def written(folder: Path) -> Path:
    """Write four requests, r0 to r3, with two outputs each; return the second one's file."""
    journal = RequestJournal(folder)
    numbers = [journal.accept(f"r{i}", b"j" * 50, [PROMPTS[1]]) for i in range(4)]
    for token in range(2):
        for number in numbers:
            journal.write_output(number, 0, delta(token))
    journal.close()
    return sorted(folder.glob("request-*"))[1]


WHOLE = {f"r{i}": [[0, 1]] for i in range(4)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), length=st.integers(1, 9))
def test_damage_costs_one_request_what_stands_behind_it(where: float, bit: int, length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "j"
        path = written(folder)
        data = bytearray(path.read_bytes())
        at = int(where * len(data))
        for place in range(at, min(len(data), at + length)):
            data[place] ^= 1 << bit
        path.write_bytes(data)
        found = left(folder)
        mine = found.pop("r1", None)
        assert found == {name: tokens for name, tokens in WHOLE.items() if name != "r1"}
        assert mine in (None, [[]], [[0]])
        assert len(list(folder.glob("damaged-*"))) == 1


def test_a_damaged_file_is_kept_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "j")
    data = bytearray(path.read_bytes())
    data[-5] ^= 255
    path.write_bytes(data)
    assert left(tmp_path / "j") == {**WHOLE, "r1": [[0]]}
    (kept,) = (tmp_path / "j").glob("damaged-*")
    assert kept.read_bytes() == bytes(data)
    (line,) = caplog.records
    assert line.fields["kept_as"] == kept.name  # type: ignore[attr-defined]
    # Read again: whole, and nothing else is kept.
    assert left(tmp_path / "j") == {**WHOLE, "r1": [[0]]}
    assert len(list((tmp_path / "j").glob("damaged-*"))) == 1


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
    frames = written(tmp_path / "evil").read_bytes()
    journal = RequestJournal(tmp_path / "j")
    journal.accept("mine", b"", [frames])
    journal.close()
    (path,) = (tmp_path / "j").glob("request-*")
    data = bytearray(path.read_bytes())
    data[-len(frames) - 20] ^= 255  # its own frame is damaged: what it holds is not read as frames
    path.write_bytes(data)
    assert left(tmp_path / "j") == {}


def test_a_journal_of_an_earlier_version_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "requests.journal").write_bytes(b"")
    with pytest.raises(ConfigError, match="of an earlier version"):
        RequestJournal(tmp_path)


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: a write takes in what fits, the next one is an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_output_that_is_refused_leaves_what_was_written(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    one = journal.accept("one", b"", [PROMPTS[0]])
    for token in range(20):
        journal.write_output(one, 0, delta(token))
    (path,) = tmp_path.glob("request-*")
    with disk_of(path.stat().st_size + 3), pytest.raises(OSError):
        journal.write_output(one, 0, delta(99))
    with disk_of(20), pytest.raises(OSError):
        journal.accept("two", b"", [PROMPTS[0]])
    assert sorted(os.listdir(tmp_path)) == ["lock", path.name]
    journal.write_output(one, 0, delta(20))
    journal.close()
    assert left(tmp_path) == {"one": [list(range(21))]}


def test_nothing_is_left_of_what_has_ended(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    pinned = journal.accept("pinned", b"", [PROMPTS[0]])
    journal.write_output(pinned, 0, delta(1))
    for i in range(50):
        number = journal.accept(f"r{i}", b"j" * 200, [bytes(400)])
        journal.write_output(number, 0, delta(2))
        journal.end(number)
    assert len(list(tmp_path.iterdir())) == 2
    journal.write_output(pinned, 0, delta(3))
    journal.close()
    assert left(tmp_path) == {"pinned": [[1, 3]]}


def test_a_journal_folder_has_one_server_and_private_permissions(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path / "j")
    with pytest.raises(ConfigError, match="another server writes to it"):
        RequestJournal(tmp_path / "j")
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o700
    journal.end(journal.accept("other", b"", []))
    journal.accept("one", b"", [])
    (path,) = (tmp_path / "j").glob("request-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
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


def test_a_full_disk_at_start_is_one_sentence(tmp_path: Path) -> None:
    RequestJournal(tmp_path / "j").close()
    with disk_of(8), pytest.raises(ConfigError, match="make room or give another folder"):
        RequestJournal(tmp_path / "j")
    RequestJournal(tmp_path / "j").close()


@pytest.mark.parametrize("name", ["", "lock", "request-000000000001", "request-000000000001.part"])
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
    if name.endswith(".part"):  # a leftover: removed, not followed
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


@pytest.mark.parametrize("name", ["request-000000000001", "lock"])
def test_a_pipe_in_place_of_a_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="--journal"):
        RequestJournal(folder)
