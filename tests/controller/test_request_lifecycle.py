"""The life of a request that instances serve whole: allowed changes of state, and an answer that survives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.lifecycle import TRANSITIONS, RequestLifecycle
from headway.core.errors import InvariantError

ANSWER = tuple(range(100, 140))
"""What any instance answers."""
STEPS = ("place", "accept", "token", "tokens", "pause", "lose", "refuse", "finish", "fail")
ALLOWED = {
    "place": {"queued", "paused", "retrying"},
    "accept": {"placed"},
    "token": {"prefilling", "decoding"},
    "tokens": {"prefilling", "decoding"},
    "pause": {"placed", "prefilling", "decoding"},
    "lose": {"placed", "prefilling", "decoding", "paused"},
    "refuse": {"placed", "prefilling", "decoding", "paused"},
    "finish": {"prefilling", "decoding"},
    "fail": set(TRANSITIONS),
}
"""States in which each step may come."""


class Instance:
    """An instance that answers an attempt with the rest of `ANSWER`."""

    def __init__(self, life: RequestLifecycle) -> None:
        self.sent = life.place(1)
        self.at = len(self.sent.output)

    def next(self, count: int) -> tuple[int, ...]:
        at, self.at = self.at, min(self.at + count, len(self.sent.output) + self.sent.max_tokens)
        return ANSWER[at : self.at]


@given(st.lists(st.sampled_from(STEPS), max_size=60), st.booleans(), st.integers(0, 5))
def test_any_order_of_events_leaves_the_client_a_prefix_of_the_one_answer(
    steps: list[str], restarts: bool, before: int
) -> None:
    life = RequestLifecycle(30, 4, ANSWER[:before], restarts=restarts)
    client = list(ANSWER[:before])
    instance: Instance | None = None
    for step in steps:
        state = life.state
        if state not in ALLOWED[step]:
            with pytest.raises(InvariantError):
                {"token": lambda: life.receive((0,)), "tokens": lambda: life.receive((0,))}.get(
                    step, lambda step=step: life.place(1) if step == "place" else getattr(life, step)()
                )()
            assert life.state == state
            continue
        if step == "place":
            instance = Instance(life)
            assert life.instance == 1
        elif step in ("token", "tokens"):
            assert instance is not None
            client += life.receive(instance.next(1 if step == "token" else 3))
        else:
            getattr(life, step)()
        assert life.on_instance == (life.instance is not None)
        assert life.output == client == list(ANSWER[: len(client)])
        assert len(client) <= 30
    assert life.over == (life.state in ("finished", "failed"))


def test_every_state_can_be_left_but_the_two_ends() -> None:
    assert {state for state, after in TRANSITIONS.items() if not after} == {"finished", "failed"}
    reached, found = {"queued"}, {"queued"}
    while found:
        found = {after for state in found for after in TRANSITIONS[state]} - reached  # type: ignore[assignment, index]
        reached |= found
    assert reached == set(TRANSITIONS)


def test_an_attempt_goes_on_after_the_tokens_so_far() -> None:
    life = RequestLifecycle(10, 5)
    life.place(0)
    life.accept()
    life.receive((1, 2, 3))
    life.lose()
    sent = life.place(1)
    assert (sent.output, sent.max_tokens, sent.min_tokens) == ((1, 2, 3), 7, 2)


def test_an_attempt_that_begins_anew_sends_only_what_is_new_and_notices_another_answer() -> None:
    life = RequestLifecycle(10, restarts=True)
    life.place(0)
    life.accept()
    life.receive((1, 2, 3))
    life.lose()
    assert life.place(1).output == ()
    life.accept()
    assert life.receive((1, 2)) == ()
    assert life.receive((3, 4)) == (4,)
    life.lose()
    life.place(0)
    life.accept()
    with pytest.raises(InvariantError, match="differs"):
        life.receive((1, 9))


def test_more_tokens_than_were_wanted_are_an_error() -> None:
    life = RequestLifecycle(2)
    life.place(0)
    life.accept()
    with pytest.raises(InvariantError, match="more than the 2"):
        life.receive((1, 2, 3))
