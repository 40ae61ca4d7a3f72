"""KV on disk: the same tokens in fp32, after evictions and restarts, and whatever has happened to the files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.helpers.embedded_engine import BLOCK, answers, engine, submit, token_bytes
from tests.helpers.polling import until

from headway.core.errors import ConfigError
from headway.core.request import BACKGROUND_PRIORITY
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import OutputDelta

POOL = 2048

Make = Callable[..., EngineCore]


def text(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(tokens)]


def run(core: EngineCore) -> list[OutputDelta]:
    deltas = core.step()
    while not core.idle:
        deltas += core.step()
    core.scheduler.check()
    return deltas


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("kv-*.safetensors"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[EngineCore] = []

    def start(pool: int = POOL, **fields: object) -> EngineCore:
        core = engine(pool, prefix_cache=True, **{"kv_spill": str(tmp_path / "spill"), **fields})
        # However fast this machine computes and however busy its disk is: what is there is read.
        core.prefixes._prefill_times.total_s = float  # type: ignore[method-assign, assignment]
        made.append(core)
        return core

    yield start
    for core in made:
        core.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineCore]:
    core = engine(8192)
    yield core
    core.close()


def cached(core: EngineCore, prompt: list[int], **fields: object) -> int:
    submit(core, "question", prompt, 1, **fields)
    return max(delta.cached_tokens for delta in run(core))


def test_evicted_prefixes_come_back_and_tokens_are_those_without_a_cache(make: Make, plain: EngineCore) -> None:
    core = make()
    documents = [text(seed, 900 + 37 * seed) for seed in range(5)]
    for turn in range(3):
        prompts = [[*document, *text(100 + turn, 20)] for document in documents]
        expected = [answers(plain, [prompt]) for prompt in prompts]
        assert [answers(core, [prompt]) for prompt in prompts] == expected
    stats = core.stats()
    # Five documents of some 970 tokens, two of which fit: each later turn reads most of them.
    assert stats.kv_restored_tokens_total > 2 * 4 * 800
    assert stats.prefix_hits_total >= stats.kv_restored_tokens_total
    assert stats.kv_spill_missed_tokens_total == 0


def test_random_traffic_under_pressure_is_exact(make: Make, plain: EngineCore) -> None:
    core = make(1024)
    for seed in range(4):
        rng = random.Random(seed)
        documents = [text(rng.randrange(6), rng.randrange(100, 400)) for _ in range(3)]
        prompts = [[*rng.choice(documents), *text(rng.randrange(99), rng.randrange(1, 30))] for _ in range(10)]
        expected = answers(plain, prompts)
        assert answers(core, prompts) == expected
        assert answers(core, prompts[::-1]) == expected[::-1]
    assert core.stats().kv_restored_tokens_total > 0


@pytest.mark.parametrize("tokens", [1000, 1007, 1008])
def test_a_prepared_document_survives_a_restart(make: Make, plain: EngineCore, tokens: int) -> None:
    document = text(0, tokens)
    first = make()
    submit(first, "doc", document, 1, pin=True)
    deltas = run(first)
    assert deltas[-1].stored
    first.close()
    second = make()
    question = [*document, 1, 2, 3]
    submit(second, "question", question, 8)
    deltas = run(second)
    assert deltas[0].cached_tokens == tokens // BLOCK * BLOCK
    assert [[token for delta in deltas for token in delta.tokens]] == answers(plain, [question])
    assert second.stats().prefill_tokens_total < 2 * BLOCK


def test_a_salt_s_blocks_are_not_found_by_others(make: Make) -> None:
    document = text(0, 500)
    first = make()
    submit(first, "doc", document, 1, pin=True, cache_salt="one/")
    run(first)
    first.close()
    second = make()
    question = [*document, 1, 2, 3]
    assert cached(second, question, cache_salt="two/") == 0
    assert cached(second, [*document, 4, 5], cache_salt="one/") == 500 // BLOCK * BLOCK


def _spilled(make: Make, folder: Path) -> tuple[list[int], list[Path]]:
    """Prepare a document, and end the engine."""
    document = text(0, 1000)
    core = make()
    submit(core, "doc", document, 1, pin=True)
    run(core)
    core.close()
    found = files(folder)
    assert found
    return document, found


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "gone", "no file of KV"])
def test_a_damaged_file_is_a_miss_and_never_a_wrong_answer(
    make: Make, plain: EngineCore, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    document, found = _spilled(make, tmp_path / "spill")
    contents = found[0].read_bytes()
    changed = bytearray(contents)
    changed[len(changed) // 2] ^= 1
    core = None
    if damage == "gone":
        core = make()
        found[0].unlink()
    else:
        found[0].write_bytes(
            {"torn": contents[:-100], "flipped": bytes(changed), "empty": b"", "no file of KV": b"x" * 5000}[damage]
        )
    core = core or make()
    question = [*document, 1, 2, 3]
    assert answers(core, [question]) == answers(plain, [question])
    said = [record.getMessage() for record in caplog.records if "--kv-spill" in record.getMessage()]
    assert any(str(found[0]) in words and "\n" not in words for words in said)
    assert not found[0].exists()
    # What was computed again is kept again.
    assert cached(core, [*document, 9]) > 900


def test_a_block_in_another_s_place_is_a_miss(make: Make, plain: EngineCore, tmp_path: Path) -> None:
    """Two rows of a file change places: each is whole, and is not what its key says."""
    document, (file, *_) = _spilled(make, tmp_path / "spill")
    contents = bytearray(file.read_bytes())
    row = BLOCK * token_bytes()
    contents[-row:], contents[-2 * row : -row] = contents[-2 * row : -row], contents[-row:]
    file.write_bytes(contents)
    core = make()
    question = [*document, 1, 2, 3]
    assert answers(core, [question]) == answers(plain, [question])


def test_any_files_of_a_document_that_are_left_give_the_same_tokens(
    make: Make, plain: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill between two files leaves, and what a full disk does."""
    monkeypatch.setattr("headway.runtime.kv_spill.folder._FILE_BYTES", 8 * BLOCK * token_bytes())
    for left in range(1, 8, 2):
        spill = str(tmp_path / f"spill{left}")
        core = make(kv_spill=spill)
        submit(core, "doc", text(left, 1000), 1, pin=True)
        run(core)
        core.close()
        found = sorted(files(Path(spill)), key=lambda path: path.stat().st_mtime_ns)
        assert len(found) == 8
        for file in found[left:]:
            file.unlink()
        core = make(kv_spill=spill)
        question = [*text(left, 1000), 1, 2]
        assert answers(core, [question]) == answers(plain, [question])
        assert core.stats().kv_restored_tokens_total == left * 8 * BLOCK


def test_files_that_were_being_written_are_removed(make: Make, tmp_path: Path) -> None:
    _, found = _spilled(make, tmp_path / "spill")
    part = tmp_path / "spill" / "kv-1-1.safetensors.part"
    part.write_bytes(found[0].read_bytes()[:500])
    make()
    assert not part.exists()
    assert files(tmp_path / "spill") == found


def test_a_folder_of_another_block_size_is_refused(make: Make, tmp_path: Path) -> None:
    _spilled(make, tmp_path / "spill")
    with pytest.raises(ConfigError, match="it holds KV of another model or block size; give another folder, or delete"):
        make(block_size=32)


def test_a_folder_of_a_model_with_other_weights_is_refused(make: Make, tmp_path: Path) -> None:
    _spilled(make, tmp_path / "spill")
    other = Path(shutil.copytree(model_path(), tmp_path / "other"))
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] * 2}, weights)
    with pytest.raises(ConfigError, match="it holds KV of another model or block size; give another folder, or delete"):
        make(model=str(other))


def test_a_folder_that_cannot_be_written_is_refused_with_a_way_out(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-spill /proc/headway: .*; give a folder that can be written to$"):
        make(kv_spill="/proc/headway")


def test_a_foreign_file_is_left_out_with_a_sentence(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make(block_size=32, kv_spill=str(tmp_path / "other"))
    submit(other, "doc", text(0, 500), 1, pin=True)
    run(other)
    other.close()
    document, _ = _spilled(make, tmp_path / "spill")
    (foreign, *_) = files(tmp_path / "other")
    foreign.rename(tmp_path / "spill" / "kv-0-1.safetensors")
    core = make()
    assert cached(core, [*document, 1]) == 1000 // BLOCK * BLOCK
    assert any(
        "holds KV of another model or block size; it is left out" in each.getMessage() for each in caplog.records
    )


def test_a_folder_has_one_server(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.kv_spill.folder.ATTEMPTS", 0)
    make()
    with pytest.raises(ConfigError, match="another server writes to it; give each its own folder"):
        make()


def test_a_file_in_place_of_a_folder_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-spill .*file: "):
        make(kv_spill=str(tmp_path / "file"))


def test_the_budget_holds_and_the_least_recently_used_goes_first(make: Make, tmp_path: Path) -> None:
    budget = 1500 * token_bytes()
    core = make(1024, kv_spill_bytes=budget)
    for seed in range(8):
        answers(core, [text(seed, 600)])
        run(core)
        assert sum(path.stat().st_size for path in files(tmp_path / "spill")) < 1.1 * budget
        assert core.stats().kv_spill_bytes <= budget
    assert cached(core, [*text(0, 600), 1]) == 0
    assert cached(core, [*text(6, 600), 1]) > 300


def test_prepared_documents_are_not_deleted_for_evicted_prefixes(make: Make) -> None:
    core = make(1024, kv_spill_bytes=700 * token_bytes())
    submit(core, "doc", text(0, 500), 1, pin=True)
    run(core)
    for seed in range(1, 6):
        submit(core, "other", text(seed, 600), 1)
        # Its memory made way for others; it is on disk.
        assert not any(delta.id == "doc" and delta.finish for delta in run(core))
    core.close()
    assert cached(make(1024), [*text(0, 500), 1]) == 500 // BLOCK * BLOCK


def test_a_full_disk_is_said_once_and_serving_goes_on(
    make: Make, plain: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = make(1024)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.core.private_folder.PrivateFolder.write", full)
    prompts = [text(seed, 700) for seed in range(4)]
    for _ in range(2):
        for prompt in prompts:
            assert answers(core, [prompt]) == answers(plain, [prompt])
    said = [each.getMessage() for each in caplog.records if "No space left" in each.getMessage()]
    assert len(said) == 1
    assert "make room" in said[0]
    assert core.stats().kv_spill_bytes == 0


def test_what_is_faster_to_compute_is_not_read(make: Make, tmp_path: Path) -> None:
    document, _ = _spilled(make, tmp_path / "spill")
    core = make()
    core.prefixes._prefill_times.total_s = lambda tokens: 0.0  # type: ignore[method-assign]
    assert cached(core, [*document, 1]) == 0
    assert core.stats().kv_restored_tokens_total == 0


def test_a_prompt_s_blocks_that_have_arrived_interrupt_the_preparation_of_others(make: Make, tmp_path: Path) -> None:
    document, _ = _spilled(make, tmp_path / "spill")
    core = make()
    assert not core.prefixes.arrived
    submit(core, "question", [*document, 1], 1)
    until(lambda: core.prefixes.arrived)
    submit(core, "other", text(9, 600), 1, priority=BACKGROUND_PRIORITY)
    core.executor.interrupts = lambda: core.prefixes.arrived
    run(core)
    assert not core.prefixes.arrived
    assert core.stats().kv_restored_tokens_total == 1000 // BLOCK * BLOCK


def test_requests_that_begin_alike_share_one_reading(make: Make, plain: EngineCore, tmp_path: Path) -> None:
    document, _ = _spilled(make, tmp_path / "spill")
    core = make()
    prompts = [[*document, i] for i in range(4)]
    assert answers(core, prompts) == answers(plain, prompts)
    assert core.stats().kv_restored_tokens_total == 1000 // BLOCK * BLOCK


def test_a_spill_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv-spill keeps cached prefixes: it needs prefix-cache"):
        EngineConfig(model="m", kv_spill="folder")
