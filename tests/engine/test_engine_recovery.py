"""The core begins again when what executes is lost: no request ends, none is told a token twice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.engine_fixtures import INFO, Heard, frame, make_core, run, submit
from tests.helpers.fake_executor import FakeExecutor, answer

from headway.core.errors import HeadwayError
from headway.core.request import SamplingParams
from headway.runtime.engine.config import GaveUpError, PoisonRequestTracker, RestartLimit
from headway.runtime.engine.protocol import SubmitRequest

PROMPTS = {"a": [5] * 40, "b": [7, 8, 9], "c": list(range(3, 200))}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(losses=st.sets(st.integers(0, 30), max_size=6))
def test_every_answer_is_that_of_an_undisturbed_run(losses: set[int]) -> None:
    executor = FakeExecutor(waits_on=("wire",))
    core = make_core(executor)
    core._restarts = RestartLimit(100, "the workers")
    for name, prompt in PROMPTS.items():
        assert submit(core, name, prompt, max_tokens=12) is None
    heard = Heard()
    for step in range(400):
        if step in losses:
            executor.lose = "worker 1 has ended"
        heard.hear(core.step())
        core.scheduler.check()
        if core.idle and step > 30:
            break
    assert core.idle
    assert not core.recovering
    assert heard.tokens == {name: answer(prompt, 12) for name, prompt in PROMPTS.items()}
    stats = core.stats()
    assert stats.recoveries_total == len(losses)
    assert stats.lost_tokens_total > 0 or not losses & {2, 3, 4}
    assert not executor.residents


def test_nothing_is_scheduled_while_the_state_is_recovering() -> None:
    executor = FakeExecutor(waits_on=("wire",))
    core = make_core(executor)
    assert submit(core, "a", PROMPTS["a"]) is None
    core.step()
    executor.lose, executor.recovers = "worker 0 is gone", False
    core.step()
    batches = len(executor.batches)
    for _ in range(5):
        assert core.step() == []
        assert core.stats().recovering
    assert submit(core, "late", PROMPTS["b"]) is None
    assert len(executor.batches) == batches
    executor.recovers = True
    heard = run(core)
    assert not core.stats().recovering
    assert heard.tokens["late"] == answer(PROMPTS["b"], 4)


def test_requests_that_leave_while_workers_are_gone_are_forgotten() -> None:
    executor = FakeExecutor(waits_on=("wire",), hold=True)
    core = make_core(executor)
    for name in ("gone before", "gone after", "stays"):
        assert submit(core, name, PROMPTS["a"]) is None
    core.step(0.0)
    core.abort("gone before")
    executor.lose, executor.recovers, executor.hold = "worker 0 is gone", False, False
    core.step()
    core.abort("gone after")
    executor.recovers = True
    assert run(core).tokens == {"stays": answer(PROMPTS["a"], 4)}
    assert not executor.residents


def test_an_idle_engine_notices_too() -> None:
    executor = FakeExecutor(waits_on=("wire",))
    core = make_core(executor)
    executor.lose = "worker 0 is gone"
    core.step()
    assert core.stats().recoveries_total == 1


def test_workers_lost_again_and_again_are_given_up() -> None:
    executor = FakeExecutor(waits_on=("wire",))
    core = make_core(executor)
    core._restarts = RestartLimit(2, "the workers", window_s=60.0)
    for _ in range(2):
        executor.lose = "worker 3 has ended with signal 9"
        core.step()
    core.step()  # the second restart is complete
    core._clock.advance(61.0)  # type: ignore[attr-defined]
    for _ in range(2):
        executor.lose = "worker 3 has ended with signal 9"
        core.step()
    executor.lose = "worker 3 has ended with signal 9"
    with pytest.raises(GaveUpError, match=r"worker 3 has ended .* started again 2 times within"):
        core.step()
    assert issubclass(GaveUpError, HeadwayError)


def test_restarts_that_take_long_are_given_up_as_well() -> None:
    """A request that kills what computes it, where loading takes two minutes."""
    executor = FakeExecutor(waits_on=("wire",))
    core = make_core(executor)
    core._restarts = RestartLimit(2, "the workers", window_s=60.0)
    assert submit(core, "poison", PROMPTS["a"], max_tokens=100) is None
    for loss in range(3):
        executor.lose, executor.recovers = "worker 1 has ended", False
        if loss == 2:
            break
        core.step()
        core._clock.advance(120.0)  # type: ignore[attr-defined]
        assert core.recovering
        executor.recovers = True
        core.step()
        assert not core.recovering
        core._clock.advance(30.0)
    with pytest.raises(GaveUpError, match="2 times within 60 s of running"):
        core.step()


def test_a_restart_is_forgotten_once_it_has_held_for_a_minute() -> None:
    restarts = RestartLimit(1, "it")
    for start_s in (0.0, 500.0, 1000.0):
        restarts.spend(start_s, "gone")
        restarts.record_up(start_s + 400.0)
    with pytest.raises(GaveUpError):
        restarts.spend(1459.0, "gone")


def test_a_request_that_was_accepted_before_goes_on_behind_its_output() -> None:
    executor = FakeExecutor()
    core = make_core(executor)
    wanted = answer(PROMPTS["b"], 9)
    for told in range(9):
        message = SubmitRequest(
            id="b", prompt_tokens=3, params=SamplingParams(max_tokens=9), received_s=0.0, resubmitted=True,
            output=tuple(wanted[:told]),
        )  # fmt: skip
        assert core.submit(message, frame(PROMPTS["b"])) is None
        assert run(core).tokens["b"] == wanted[told:]


def test_what_was_accepted_is_not_refused_for_a_full_queue_and_impossible_outputs_are() -> None:
    core = make_core(FakeExecutor())
    for i in range(INFO.max_queued_requests):
        assert submit(core, f"r{i}", [3]) is None
    message = SubmitRequest(id="late", prompt_tokens=1, params=SamplingParams(max_tokens=2), received_s=0.0)
    assert core.submit(message, frame([3])).rejected == "overloaded"
    again = msgspec.structs.replace(message, resubmitted=True)
    assert core.submit(again, frame([3])) is None
    for output in ((4, 5), (-1,), (INFO.vocab_size,)):
        refused = core.submit(msgspec.structs.replace(again, id="x", output=output), frame([3]))
        assert refused is not None
        assert refused.param == "output"


def test_a_request_that_kills_workers_slowly_is_ended_and_the_service_continues() -> None:
    """Each restart holds for more than a minute; whoever was there at all losses is not begun again, the rest are."""
    executor = FakeExecutor(waits_on=("wire",), step_s=0.0)
    core = make_core(executor)
    core._restarts = RestartLimit(2, "the workers", window_s=60.0)
    assert submit(core, "poison", PROMPTS["c"], max_tokens=100) is None
    heard = Heard()
    for loss in range(3):
        name = f"beside {loss}"
        assert submit(core, name, PROMPTS["b"], max_tokens=8) is None
        for _ in range(6):
            heard.hear(core.step())
        assert not core.idle
        core._clock.advance(90.0)  # type: ignore[attr-defined]
        executor.lose = "worker 1 has ended with signal 9"
        deltas = core.step()
        assert [(delta.id, delta.finish) for delta in deltas if delta.finish] == [("poison", "error")] * (loss == 2)
        assert all("at 3 losses of workers" in (delta.error or "") for delta in deltas if delta.finish)
        heard.hear([delta for delta in deltas if delta.finish is None])
        core.step()
        assert not core.recovering
    run(core, heard)
    assert {name: heard.tokens[name] for name in heard.tokens if name != "poison"} == {
        f"beside {loss}": answer(PROMPTS["b"], 8) for loss in range(3)
    }
    assert core.idle
    assert not executor.residents
    core.scheduler.check()


def test_losses_are_forgotten_with_their_requests() -> None:
    tracker = PoisonRequestTracker()
    assert tracker.record_loss(["a", "gone"], ["a", "b"], 1) == []
    assert tracker.record_loss(["b"], ["b"], 1) == []
    assert tracker.record_loss(["a", "b"], ["a", "b"], 1) == ["b"]
    assert tracker.record_loss(["a"], ["a", "b"], 1) == ["a", "b"]


def test_losses_further_apart_than_the_rate_are_never_given_up() -> None:
    restarts, now = RestartLimit(3, "it", window_s=60.0), 0.0
    for _ in range(50):
        restarts.spend(now, "gone")
        restarts.record_up(now + 5.0)
        now += 5.0 + 21.0
    for _ in range(2):
        restarts.spend(now, "gone")
        restarts.record_up(now)
        now += 19.0
    with pytest.raises(GaveUpError, match="3 times within 60 s of running"):
        restarts.spend(now, "gone")


def test_an_operator_s_rate_lets_a_service_outlive_many_kills() -> None:
    restarts, now = RestartLimit(100, "it", window_s=60.0), 0.0
    for _ in range(100):
        restarts.spend(now, "gone")
        restarts.record_up(now)
        now += 0.5
    with pytest.raises(GaveUpError):
        restarts.spend(now, "gone")
