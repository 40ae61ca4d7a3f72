"""The index of a folder of KV blocks: as a plain list of files would say, within its budget, pinned blocks kept."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.kv_spill.files import BlockFileError, BlockFormat
from headway.runtime.kv_spill.folder import SpillFolder

BYTES = 256
FORMAT = BlockFormat("model", "float32", 16, BYTES)
BUDGET = 12


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def rows(numbers: Sequence[int]) -> np.ndarray:
    return np.array([[number % 251] * BYTES for number in numbers], dtype=np.uint8)


def write(folder: SpillFolder, numbers: Sequence[int]) -> bool:
    """Write a file of blocks, as a writer does. False: there is no room."""
    claimed = folder.claim(len(numbers))
    if claimed is None:
        return False
    name, victims = claimed
    folder.delete(victims)
    folder.add(folder.save(name, [key(number) for number in numbers], rows(numbers)))
    return True


class ListedFiles:
    """The same by brute force: files as lists of blocks, least recently used first."""

    def __init__(self) -> None:
        self.files: list[list[int]] = []
        self.pins: list[int] = []

    def write(self, numbers: list[int]) -> bool:
        left = list(self.files)
        for file in self.files:
            if sum(map(len, left)) + len(numbers) <= BUDGET:
                break
            if not set(file) & set(self.pins):
                left.remove(file)
        if sum(map(len, left)) + len(numbers) > BUDGET:
            return False
        self.files = [*left, numbers]
        return True

    def has(self, number: int) -> bool:
        return any(number in file for file in self.files)

    def use(self, number: int) -> None:
        # The file that was written last counts.
        file = next(file for file in self.written_last() if number in file)
        self.files.remove(file)
        self.files.append(file)

    def written_last(self) -> list[list[int]]:
        return sorted(self.files, key=lambda file: -file[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 5)),
            st.tuples(st.sampled_from(["use", "pin", "unpin"]), st.integers(0, 40)),
        ),
        max_size=40,
    )
)
def test_the_index_says_what_a_list_of_files_says(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder, listed, made = SpillFolder(Path(path) / "kv", FORMAT, BUDGET * BYTES), ListedFiles(), 0
        for verb, number in steps:
            if verb == "write":
                # Blocks are never written twice.
                numbers = list(range(made, made + number))
                made += number
                assert write(folder, numbers) == listed.write(numbers)
            elif verb == "use" and listed.has(number):
                (where,) = folder.ranges([key(number)])
                listed.use(number)
                assert (folder.load(where)[0] == rows([number])).all()
            elif verb == "pin":
                folder.pin([key(number)])
                listed.pins.append(number)
            elif verb == "unpin" and number in listed.pins:
                folder.unpin([key(number)])
                listed.pins.remove(number)
            assert [key(each) in folder for each in range(made)] == [listed.has(each) for each in range(made)]
            assert folder.used == BYTES * sum(map(len, listed.files)) <= BUDGET * BYTES
            assert len(list((Path(path) / "kv").glob("kv-*"))) == len(listed.files)
        kept = {number for file in listed.files for number in file}
        folder.close()
        again = SpillFolder(Path(path) / "kv", FORMAT, BUDGET * BYTES)
        assert {each for each in range(made) if key(each) in again} == kept
        again.close()


def test_consecutive_blocks_are_one_range_and_checked_together(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path / "kv", FORMAT, 1 << 20)
    assert write(folder, range(8))
    assert write(folder, range(8, 12))
    found = folder.ranges([key(number) for number in range(2, 11)])
    assert [(each.first, each.count) for each in found] == [(2, 6), (0, 3)]
    assert (np.concatenate([folder.load(each)[0] for each in found]) == rows(range(2, 11))).all()
    file = tmp_path / "kv" / found[0].head.name
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    with pytest.raises(BlockFileError, match="its checksums do not hold"):
        folder.load(found[0])
    folder.close()


def test_a_smaller_budget_deletes_what_is_above_it(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path / "kv", FORMAT, 100 * BYTES)
    for first in range(0, 40, 8):
        assert write(folder, range(first, first + 8))
    folder.close()
    smaller = SpillFolder(tmp_path / "kv", FORMAT, 20 * BYTES)
    assert smaller.used == 16 * BYTES
    assert len(list((tmp_path / "kv").glob("kv-*"))) == 2
    smaller.close()
