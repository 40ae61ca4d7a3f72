"""Random checkpoints and tokenizers are equal to transformers', or refused in one sentence.

`python -m tests.parity` prints the counts, `--only tokenizer --first SEED --cases 1` one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from tests.parity.checkpoints import checkpoint_case
from tests.parity.outcomes import Outcome, report, run
from tests.parity.tokenizers_ import tokenizer_case

pytest.importorskip("transformers")

CASES = {"checkpoint": checkpoint_case, "tokenizer": tokenizer_case}


def check(name: str, case: Callable[[int], Outcome], seeds: Iterable[int]) -> None:
    outcomes = [(name, seed, one) for seed, one in run(case, seeds)]
    results = [one.result for _, _, one in outcomes]
    assert not {"differs", "alone"} & set(results), report(outcomes)
    assert results.count("equal") > 0.3 * len(results)


@pytest.mark.parametrize("first", range(0, 60, 20))
@pytest.mark.parametrize("name", CASES)
def test_some_are_equal_or_refused(name: str, first: int) -> None:
    check(name, CASES[name], range(first, first + 20))


@pytest.mark.long
@pytest.mark.parametrize("first", [1000, 2000, 3000])
@pytest.mark.parametrize("name", CASES)
def test_many_are_equal_or_refused(name: str, first: int) -> None:
    check(name, CASES[name], range(first, first + 350))
