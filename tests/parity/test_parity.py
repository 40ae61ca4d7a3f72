"""Random checkpoints and tokenizers are equal to transformers', or refused in one sentence.

`python -m tests.parity` prints the counts, `--only tokenizer --first SEED --cases 1` one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from tests.helpers.marks import quick_first
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


@pytest.mark.parametrize("seeds", quick_first([range(40), *(range(at, at + 350) for at in (1000, 2000, 3000))]))
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_and_tokenizers_are_equal_or_refused(name: str, seeds: range) -> None:
    check(name, CASES[name], seeds)
