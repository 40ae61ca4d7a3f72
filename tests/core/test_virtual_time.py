"""The tests' own loop in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers import virtual_time
from tests.helpers.virtual_time import loop_time


def test_pauses_pass_in_order_and_cost_no_time() -> None:
    async def main() -> list[tuple[str, float]]:
        began, seen = loop_time(), []

        async def pause(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, round(loop_time() - began, 6)))

        await asyncio.gather(pause("hour", 3600.0), pause("day", 86400.0), pause("second", 1.0))
        return seen

    assert virtual_time.run(main()) == [("second", 1.0), ("hour", 3600.0), ("day", 86400.0)]


def test_a_run_in_which_nothing_can_happen_any_more_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="nothing can happen any more"):
        virtual_time.run(main())
