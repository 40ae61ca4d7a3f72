"""The engine's loop on a fake executor: tokens per request, ends of requests, and rejections."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.engine_fixtures import EOS, INFO, Heard, frame, make_core, run, submit
from tests.helpers.fake_executor import VOCAB, FakeExecutor, answer

from headway.core.batch import ManualClock
from headway.core.errors import OverloadedError
from headway.core.request import SamplingParams, Slo
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.engine.requests import rejection_error


def clock_of(core: EngineCore) -> ManualClock:
    clock = core._clock
    assert isinstance(clock, ManualClock)
    return clock


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_its_own_tokens_whatever_runs_beside_it(seed: int, stages: int) -> None:
    """Arrivals, aborts and a pool that runs out; the executor asserts what a real one needs."""
    rng = random.Random(seed)
    executor = FakeExecutor(blocks=20)
    info = replace(INFO, max_model_len=320, max_queued_requests=1000)
    core = make_core(executor, info, stages=stages)
    prompts = {f"r{i}": [rng.randrange(VOCAB) for _ in range(rng.choice((1, 20, 200)))] for i in range(25)}
    waiting, heard, sizes, aborted = list(prompts), Heard(), {}, set()
    while waiting or not core.idle:
        if waiting and rng.random() < 0.3:
            name = waiting.pop()
            sizes[name] = rng.randint(1, 100)
            assert submit(core, name, prompts[name], max_tokens=sizes[name]) is None
        if sizes and rng.random() < 0.03:
            name = rng.choice(sorted(sizes))
            delta = core.abort(name)
            assert (delta is None) == (name in heard.last or name in aborted)
            if delta is not None:
                aborted.add(name)
                heard.last[name] = delta
        heard.hear(core.step())
        clock_of(core).advance(0.01)
        core.scheduler.check()
    for name, prompt in prompts.items():
        whole = answer(prompt, sizes[name])
        got = heard.tokens.get(name, [])
        assert got == whole[: len(got)]
        assert (got == whole and heard.last[name].finish == "length") or name in aborted
    assert executor.residents == {}
    assert sorted(executor.forgotten) == sorted(prompts)
    assert core.scheduler.block_manager.free_blocks == 20  # type: ignore[attr-defined]


def test_an_end_token_ends_the_answer_and_is_not_in_it() -> None:
    core = make_core(FakeExecutor(script={"a": {2: EOS}}))
    submit(core, "a", [5, 6], max_tokens=10)
    heard = run(core)
    assert heard.tokens["a"] == answer([5, 6], 2)
    assert (heard.last["a"].finish, heard.last["a"].stop_token, heard.last["a"].tokens) == ("stop", EOS, ())


def test_stop_token_ids_end_it_too() -> None:
    core = make_core(FakeExecutor(script={"a": {1: 77}}))
    submit(core, "a", [5], max_tokens=10, stop_token_ids=(76, 77))
    heard = run(core)
    assert (len(heard.tokens["a"]), heard.last["a"].stop_token) == (1, 77)


def test_ignore_eos_goes_on_to_the_length_but_stop_ids_still_hold() -> None:
    core = make_core(FakeExecutor(script={"a": {1: EOS}, "b": {1: EOS, 2: 9}}))
    submit(core, "a", [5], max_tokens=3, ignore_eos=True)
    submit(core, "b", [5], max_tokens=9, ignore_eos=True, stop_token_ids=(9,))
    heard = run(core)
    assert heard.tokens["a"][1] == EOS
    assert (len(heard.tokens["a"]), heard.last["a"].finish) == (3, "length")
    assert (len(heard.tokens["b"]), heard.last["b"].finish) == (2, "stop")


def test_an_end_token_before_min_tokens_does_not_end_it() -> None:
    core = make_core(FakeExecutor(script={"a": {0: EOS, 2: EOS, 3: EOS}}))
    submit(core, "a", [5], max_tokens=9, min_tokens=3)
    heard = run(core)
    assert (len(heard.tokens["a"]), heard.last["a"].finish) == (3, "stop")


def test_output_ends_where_the_model_does() -> None:
    core = make_core(info=replace(INFO, max_model_len=20))
    submit(core, "a", [1] * 15, max_tokens=1000)
    heard = run(core)
    assert (len(heard.tokens["a"]), heard.last["a"].finish) == (5, "length")


def test_the_first_delta_has_the_time_of_first_scheduling() -> None:
    core = make_core()
    submit(core, "a", [1] * 300, max_tokens=3)
    clock_of(core).advance(1.0)
    firsts = []
    while not core.idle:
        clock_of(core).advance(0.5)
        firsts += [delta.first_scheduled_s for delta in core.step()]
    assert firsts == [1.5, None, None]


# -- refusals ---------------------------------------------------------------------------------------------------


def message(name: str, tokens: int) -> SubmitRequest:
    return SubmitRequest(id=name, prompt_tokens=tokens, params=SamplingParams(), received_s=0.0)


@pytest.mark.parametrize(
    ("name", "tokens", "said", "words", "param"),
    [
        ("first", [1, 2], 2, "'first' is in use", "id"),
        ("x", [], 0, "holds 0 tokens", "prompt"),
        ("x", [1, 2], 3, "holds 2 tokens, not 3", "prompt"),
        ("x", [1] * 512, 512, "has 512 tokens; this model serves at most 512", "prompt"),
        ("x", [1, VOCAB], 2, "between 0 and 999", "prompt"),
        ("x", [-1, 1], 2, "between 0 and 999", "prompt"),
    ],
)
def test_a_bad_request_is_refused_by_field_and_the_others_go_on(
    name: str, tokens: list[int], said: int, words: str, param: str
) -> None:
    core = make_core()
    submit(core, "first", [9, 9, 9])
    delta = core.submit(message(name, said), frame(tokens))
    assert delta is not None
    assert (delta.id, delta.finish, delta.param) == (name, "error", param)
    assert words in (delta.error or "")
    assert run(core).tokens == {"first": answer([9, 9, 9], 4)}


def test_a_frame_of_broken_length_is_refused_and_does_not_end_the_engine() -> None:
    core = make_core()
    delta = core.submit(message("x", 1), memoryview(b"12345"))
    assert delta is not None
    assert (delta.param, "5 bytes" in (delta.error or "")) == ("prompt", True)
    assert core.idle


def test_beyond_the_queue_limit_requests_are_refused_as_overload() -> None:
    core = make_core(info=replace(INFO, max_queued_requests=2))
    assert [submit(core, name, [1, 2]) for name in "ab"] == [None, None]
    delta = submit(core, "c", [1, 2])
    assert delta is not None
    assert (delta.finish, delta.rejected) == ("error", "overloaded")
    core.step()
    assert submit(core, "d", [1, 2]) is None
    assert sorted(run(core).last) == ["a", "b", "d"]


def test_a_request_that_would_be_late_is_refused_with_a_time_to_retry_if_it_asked_for_that() -> None:
    events: list[dict[str, Any]] = []
    core = make_core(log=lambda kind, fields: events.append({"event": kind, **fields}))
    assert submit(core, "ahead", [1] * 200) is None
    slo = Slo(ttft_s=1e-9, refuse_late=True)
    asking = SubmitRequest(id="late", prompt_tokens=2, params=SamplingParams(max_tokens=2), received_s=0.0, slo=slo)
    delta = core.submit(asking, memoryview(frame([1, 2])))
    assert delta is not None
    assert delta.rejected == "overloaded"
    error = rejection_error(delta)
    assert isinstance(error, OverloadedError)
    assert 0 < error.retry_after_s < 60
    patient = replace(asking, slo=Slo(ttft_s=1e-9))
    assert core.submit(patient, memoryview(frame([1, 2]))) is None
    assert sorted(run(core).last) == ["ahead", "late"]
    assert core.stats().refused_late_total == 1
    assert [event["request"] for event in events if event["event"] == "refuse"] == ["late"]


def test_draining_finishes_what_was_accepted_and_takes_nothing_new() -> None:
    core = make_core()
    submit(core, "a", [1, 2], max_tokens=6)
    submit(core, "b", [3, 4], max_tokens=3)
    core.draining = True
    delta = submit(core, "c", [5])
    assert delta is not None
    assert (delta.finish, delta.rejected) == ("error", "unavailable")
    heard = run(core)
    assert {name: len(tokens) for name, tokens in heard.tokens.items()} == {"a": 6, "b": 3}
    assert core.idle


# -- ends from outside ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "prefill in flight", "decode in flight", "decoding"])
def test_abort_in_every_state_frees_the_request_and_no_other(state: str) -> None:
    executor = FakeExecutor()
    core = make_core(executor)
    heard = Heard()
    submit(core, "other", [7, 8], max_tokens=30)
    heard.hear(core.step())
    submit(core, "a", [1] * 400, max_tokens=30)
    if state == "mid-prefill":
        heard.hear(core.step())
    elif state == "prefill in flight":
        executor.hold = True
        heard.hear(core.step())
    elif state in ("decode in flight", "decoding"):
        while "a" not in heard.tokens:
            heard.hear(core.step())
        if state == "decode in flight":
            executor.hold = True
            heard.hear(core.step())
    flying = bool(core._batches)
    assert flying == ("in flight" in state)
    before = list(heard.tokens.get("a", []))
    delta = core.abort("a")
    assert delta is not None
    assert delta.finish == "abort"
    assert ("a" in executor.forgotten) == (not flying)
    assert core.abort("a") is None
    executor.hold = False
    run(core, heard)
    assert "a" not in core.scheduler
    assert heard.tokens.get("a", []) == before
    assert heard.tokens["other"] == answer([7, 8], 30)
    assert sorted(executor.forgotten) == ["a", "other"]
    assert core.scheduler.block_manager.free_blocks == core.scheduler.block_manager.n_blocks  # type: ignore[attr-defined]


def test_a_request_times_out_by_its_own_clock_and_others_do_not() -> None:
    core = make_core()
    submit(core, "slow", [1] * 300, timeout_s=1.0, max_tokens=50)
    submit(core, "b", [2, 3], timeout_s=100.0, max_tokens=20)
    heard = Heard()
    heard.hear(core.step())
    clock_of(core).advance(0.99)
    heard.hear(core.step())
    assert "slow" not in heard.last
    clock_of(core).advance(0.01)
    heard.hear(core.step())
    assert heard.last["slow"].finish == "timeout"
    assert run(core, heard).tokens["b"] == answer([2, 3], 20)


def test_an_old_time_out_does_not_end_a_later_request_of_the_same_name() -> None:
    core = make_core()
    submit(core, "a", [1, 2], timeout_s=1.0, max_tokens=1)
    run(core)
    clock_of(core).advance(0.9)
    submit(core, "a", [1, 2], timeout_s=1.0, max_tokens=5)
    clock_of(core).advance(0.5)
    heard = run(core)
    assert (heard.last["a"].finish, heard.tokens["a"]) == ("length", answer([1, 2], 5))


def test_counters_never_fall_and_add_up() -> None:
    core = make_core(FakeExecutor(blocks=12), replace(INFO, max_model_len=160))
    prompts = {f"r{i}": [i + 1] * 50 for i in range(5)}
    for name, prompt in prompts.items():
        submit(core, name, prompt, max_tokens=60)
    before = core.stats()
    counters = [name for name in before.__struct_fields__ if name.endswith("_total") and not name.startswith("kv")]
    while not core.idle:
        core.step()
        after = core.stats()
        assert all(getattr(after, name) >= getattr(before, name) for name in counters)
        assert after.kv_tokens_used <= after.kv_tokens_total == 192
        before = after
    assert (before.running, before.waiting, before.kv_tokens_used) == (0, 0, 0)
    assert before.preemptions_total > 0
    assert before.prefill_tokens_total + before.decode_tokens_total == 5 * (50 + 59) + before.recomputed_tokens_total
