"""What the adapter reads differently in older versions of vLLM, on stand-ins for their schedulers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.vllm import adapter


class Queue(list[Any]):
    """As much of vLLM's request queue as is asked for."""

    def add_request(self, request: Any) -> None:
        self.append(request)

    def remove_requests(self, requests: Any) -> None:
        self[:] = [one for one in self if one not in requests]


def request(name: str, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_prompt_tokens=100, num_tokens=104)


def test_requests_that_the_policy_decides_about_leave_the_second_queue_of_older_versions() -> None:
    aside = Queue([request("grammar"), request("a"), request("b")])
    scheduler = SimpleNamespace(waiting=Queue([request("c")]), skipped_waiting=aside)
    adapter.put_back(scheduler, {"a", "b", "c"})
    assert [one.request_id for one in scheduler.waiting] == ["c", "a", "b"]
    assert [one.request_id for one in aside] == ["grammar"]


def test_newer_versions_have_one_queue_and_one_for_requests_with_blocks() -> None:
    scheduler = SimpleNamespace(waiting=Queue(), kv_holding_waiting=Queue(), _holds_kv_blocks=lambda one: True)
    adapter.put_back(scheduler, {"a"})
    assert adapter.holds_kv_blocks(scheduler, request("a"))
    older = SimpleNamespace(waiting=Queue(), skipped_waiting=Queue(), _holds_kv_blocks=lambda one: True)
    assert not adapter.holds_kv_blocks(older, request("a"))


class OlderCoordinator:
    """Up to vLLM 0.30."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Any, num_encoder_tokens: int,
        total_computed_tokens: int, num_local_computed_tokens: int, num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:  # fmt: skip
        self.asked = {"tokens": num_tokens, "computed": total_computed_tokens}
        return 7


class NewerCoordinator(OlderCoordinator):
    """From vLLM 0.31 on."""

    def get_num_blocks_to_allocate(self, *, prefill_end: int = 0, **more: Any) -> int:  # type: ignore[override]
        super().get_num_blocks_to_allocate(**more)
        self.asked["end"] = prefill_end
        return 9


@pytest.mark.parametrize(("coordinator", "end"), [(OlderCoordinator(), {}), (NewerCoordinator(), {"end": 103})])
def test_blocks_are_asked_for_as_each_version_can_be_asked(coordinator: Any, end: dict[str, int]) -> None:
    hit = SimpleNamespace(blocks=((),))
    manager = SimpleNamespace(
        coordinator=coordinator, empty_kv_cache_blocks=hit, get_computed_blocks=lambda one: (hit, 32, 0)
    )
    scheduler = SimpleNamespace(kv_cache_manager=manager, max_model_len=90)
    assert adapter.needed_blocks(scheduler, request("a"), 100) == (9 if end else 7)
    assert coordinator.asked == {"tokens": 90, "computed": 32, **end}
    adapter.needed_blocks(scheduler, request("a", computed=48), 64)
    assert coordinator.asked == {"tokens": 64, "computed": 48, **end}


def test_prefills_that_vllm_would_hold_back_are_refused_with_what_to_do() -> None:
    def configured(**fields: object) -> Any:
        return SimpleNamespace(scheduler_config=SimpleNamespace(**fields))

    for fields in ({}, {"prefill_schedule_interval": 1}, {"prefill_schedule_interval": None}):
        adapter.refuse_held_prefills(configured(**fields))
    with pytest.raises(ConfigError, match=r"--prefill-schedule-interval 4 .*: leave it out"):
        adapter.refuse_held_prefills(configured(prefill_schedule_interval=4))
