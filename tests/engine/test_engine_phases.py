"""The engine's loop on requests of which it does a part: prefill only, decode only."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.helpers.engine_fixtures import EOS, INFO, frame, make_core, run
from tests.helpers.fake_executor import FakeExecutor, answer

from headway.core.request import Phase, SamplingParams
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest

PROMPT = list(range(5, 45))


def submit_phase(
    core: EngineCore,
    name: str,
    phase: Phase,
    output: tuple[int, ...] = (),
    timeout_s: float | None = None,
    most: int = 6,
) -> OutputDelta | None:
    message = SubmitRequest(
        id=name,
        prompt_tokens=len(PROMPT),
        params=SamplingParams(max_tokens=most),
        received_s=core._clock.now(),
        timeout_s=timeout_s,
        output=output,
        phase=phase,
    )
    return core.submit(message, frame(PROMPT))


def take_up(core: EngineCore, name: str, output: tuple[int, ...]) -> None:
    """Tell the fake executor that KV of all but the last token is there, as it is on one that has been sent it."""
    assert submit_phase(core, name, "decode", output) is None
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    executor.residents[name].computed = len(PROMPT) + len(output) - 1


def test_prefill_then_decode_equals_one_instance() -> None:
    core = make_core()
    assert submit_phase(core, "a", "prefill") is None
    heard = run(core)
    whole = answer(PROMPT, 6)
    assert heard.tokens["a"] == whole[:1]
    assert "a" not in heard.last
    assert core.staged == [OutputDelta(id="a", staged=len(PROMPT))]
    assert core.abort("a") is None
    assert core.stats().kv_tokens_used == 48
    take_up(core, "a", (whole[0],))
    assert run(core, heard).tokens["a"] == whole
    assert heard.last["a"].finish == "length"
    assert core.stats().kv_tokens_used == 0
    assert core.stats().prefill_tokens_total == len(PROMPT)
    assert core.stats().decode_tokens_total == 5


@pytest.mark.parametrize("how", ["stop", "length"])
def test_a_first_token_that_ends_a_prefill_ends_the_request(how: str) -> None:
    core = make_core(FakeExecutor(script={"a": {0: EOS}} if how == "stop" else {}))
    assert submit_phase(core, "a", "prefill", most=6 if how == "stop" else 1) is None
    assert run(core).last["a"].finish == how
    assert core.staged == []
    assert core.stats().kv_tokens_used == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_request_times_out_and_is_aborted_in_every_phase(phase: Phase) -> None:
    for how in ("timeout", "abort"):
        core = make_core(FakeExecutor(hold=True))
        output = ()
        if phase == "decode":
            core.scheduler.staged_kv.request("a", len(PROMPT), 0.0)
            core.scheduler.staged_kv.admit()
            output = tuple(answer(PROMPT, 1))  # type: ignore[assignment]
        assert submit_phase(core, "a", phase, output, timeout_s=1.0) is None
        core.executor.residents["a"].computed = len(PROMPT) if phase == "decode" else 0  # type: ignore[attr-defined]
        core.step()  # in flight
        if how == "timeout":
            core._clock.advance(2.0)  # type: ignore[attr-defined]
            assert [delta.finish for delta in core.step()] == ["timeout"]
        else:
            delta = core.abort("a")
            assert delta is not None
            assert delta.finish == "abort"
        core.executor.released = 1  # type: ignore[attr-defined]
        assert core.step() == []
        assert core.idle
        assert core.staged == []
        core.scheduler.check()
        assert core.stats().kv_tokens_used == 0


def test_a_decode_without_kv_is_refused_and_nothing_stays() -> None:
    core = make_core()
    delta = submit_phase(core, "a", "decode", tuple(answer(PROMPT, 1)))
    assert delta is not None
    assert (delta.finish, delta.error) == ("error", "KV of 'a' is not here")
    assert core.executor.residents == {}  # type: ignore[attr-defined]
    assert core.idle


def test_what_was_accepted_elsewhere_is_not_refused_for_a_queue_or_a_drain() -> None:
    core = make_core(info=replace(INFO, max_queued_requests=0))
    core.draining = True
    staged_kv = core.scheduler.staged_kv
    assert staged_kv is not None
    staged_kv.request("a", len(PROMPT), 0.0)
    staged_kv.admit()
    whole = answer(PROMPT, 6)
    take_up(core, "a", (whole[0],))
    assert run(core).tokens["a"] == whole[1:]
    refused = submit_phase(core, "b", "prefill")
    assert refused is not None
    assert refused.rejected == "unavailable"
