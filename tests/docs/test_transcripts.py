"""Commands show what docs/reference/transcripts.md shows, but for numbers."""

from __future__ import annotations

import pytest
from scripts.make_transcripts import BESIDE_VLLM, PARTS, can_run, holds, shape

SLOW = {BESIDE_VLLM, "A plan from a question", "All policies on one workload"}


@pytest.mark.parametrize("title", [pytest.param(title, marks=[pytest.mark.long] * (title in SLOW)) for title in PARTS])
def test_a_command_shows_what_the_page_shows(title: str) -> None:
    if not can_run(title):
        pytest.skip("needs vLLM's environment: make vllm")
    assert holds(title), "run `python -m scripts.make_transcripts`"


def test_the_shape_of_a_screen_is_its_words() -> None:
    assert shape("chat  TTFT P99   1.0 s\n  60%,\n97 of 1,500") == shape("chat TTFT P99 604 ms 7%, 9 of 15")
    assert shape("chat TTFT P99 604 ms") != shape("chat TBT P99 604 ms")
    assert shape("idle 4.5%") != shape("4.5% idle")
