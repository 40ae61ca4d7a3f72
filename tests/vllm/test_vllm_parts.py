"""The parts of the plug-in that need no vLLM: settings, seams, the gate, the pool and the step clock."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path

import msgspec
import pytest

from headway.core.errors import ConfigError
from headway.perf.hardware import MODELS
from headway.perf.latency.base import BatchLoad
from headway.perf.latency.table import MachineRates, roofline, save
from headway.policy.hosted.driver import GatedQueueMethods, ReservedKvPool, StepClock
from headway.policy.hosted.settings import VllmSettings, read_settings
from headway.vllm import plugin
from headway.vllm.latency import EngineFacts, _best_s, latency_model, machine_rates, model_shape


class ArrivalQueue(deque[str]):
    """vLLM's first-come queue, as far as the gate uses it."""

    add_request = deque.append
    pop_request = deque.popleft
    prepend_request = deque.appendleft
    prepend_requests = deque.extendleft
    remove_request = deque.remove

    def peek_request(self) -> str:
        return self[0]

    def remove_requests(self, gone: set[str]) -> None:
        kept = [request for request in self if request not in gone]
        self.clear()
        self.extend(kept)


def test_a_closed_gate_shows_the_choice_in_its_order() -> None:
    gate = GatedQueueMethods(ArrivalQueue("abcd"))
    gate.show(["c", "a"])
    assert bool(gate)
    assert gate.peek_request() == "c"
    assert [gate.pop_request(), gate.pop_request()] == ["c", "a"]
    assert not gate
    assert len(gate) == 2
    assert list(gate) == ["b", "d"]


def test_what_is_put_aside_in_a_step_is_not_shown_again_in_it() -> None:
    gate = GatedQueueMethods(ArrivalQueue("ab"))
    gate.show(["b"])
    gate.prepend_requests([gate.pop_request()])
    gate.prepend_request("preempted")
    assert not gate
    assert list(gate) == ["preempted", "b", "a"]


def test_an_ended_request_leaves_the_gate_too() -> None:
    gate = GatedQueueMethods(ArrivalQueue("abc"))
    gate.show(["b", "c"])
    gate.remove_requests(["b", "unknown"])
    assert gate.peek_request() == "c"
    assert list(gate) == ["a", "c"]


def test_an_open_gate_is_the_queue_itself() -> None:
    gate = GatedQueueMethods(ArrivalQueue("ab"))
    gate.show([])
    gate.open()
    assert bool(gate)
    assert [gate.peek_request(), gate.pop_request(), gate.pop_request()] == ["a", "a", "b"]
    assert not gate


def test_pledges_shrink_as_blocks_are_allocated_and_end_with_the_prompt() -> None:
    free, held = 100, {"a": 0, "b": 0}
    pool = ReservedKvPool(
        100, 1600, lambda: free - sum(held.values()), lambda name, tokens: -(-tokens // 16) - held[name], 16
    )
    assert pool.pledge("a", 800)
    assert pool.free_blocks == 50
    assert not pool.pledge("b", 800, headroom_blocks=1)
    assert pool.free_blocks == 50
    held["a"] = 30
    pool.settle("a")
    assert pool.pledged_blocks == 20
    assert pool.free_blocks == 50
    pool.complete("a")
    assert pool.free_blocks == 70
    assert pool.held_blocks("a") == 50
    pool.drop("a")
    pool.drop("never seen")
    assert pool.held_blocks("a") == 0


def test_time_of_overlapping_steps_is_counted_once() -> None:
    clock = StepClock()
    load = BatchLoad(tokens=1)
    clock.made(1, 10.0, load, 0.5)
    clock.made(2, 10.1, load, 0.5)
    assert clock.returned(1, 11.0) == (load, 1.0, 0.5)
    assert clock.returned(2, 11.75) == (load, 0.75, 0.5)
    assert clock.returned(2, 12.0) is None


def test_settings_name_what_is_wrong() -> None:
    assert read_settings({}) == VllmSettings()
    assert read_settings({"headway": {"t_target_ms": 40}, "other": 1}).t_target_ms == 40
    with pytest.raises(ConfigError, match=r"tbt is not a field; allowed here: t_target_ms"):
        read_settings({"headway": {"tbt": 1}})
    with pytest.raises(ConfigError, match=r"t_target_ms must be at least 1, not -5"):
        read_settings({"headway": {"t_target_ms": -5}})
    with pytest.raises(ConfigError, match="must be an object"):
        read_settings({"headway": 5})
    with pytest.raises(ConfigError, match="unknown scheduling policy 'best'"):
        read_settings({"headway": {"policy": "best"}}).scheduler_config(1, 1, 1, 1)


def test_unknown_seams_are_refused_unless_they_are_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(plugin.KNOWN["0.32.0"])
    assert plugin.require_known(plugin.compare("0.32.0+cpu", known)) is None
    changed = plugin.compare("0.99.0", {**known, "schedule": "other", "add_request": ""})
    monkeypatch.delenv(plugin.TRY_ANYWAY, raising=False)
    with pytest.raises(ConfigError, match=r"vLLM 0\.99\.0.*add_request \(missing\), schedule\..*Drop --scheduler-cls"):
        plugin.require_known(changed)
    monkeypatch.setenv(plugin.TRY_ANYWAY, "1")
    assert "Going on" in (plugin.require_known(changed) or "")


def test_a_missing_seam_has_no_digest() -> None:
    class Nothing:
        def schedule(self) -> None: ...

    found = plugin.digests(Nothing)
    assert found["schedule"]
    assert not found["update_from_output"]


def test_latency_starts_from_the_device_or_from_a_profile(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256}
    facts = EngineFacts(hf_config=config, dtype_bytes=2, device_name="NVIDIA H200", tensor_parallel=2)
    assert machine_rates(facts).name == "NVIDIA H200 as h200-141gb"
    model, told = latency_model(VllmSettings(), facts)
    assert "H200" in told
    _, told = latency_model(VllmSettings(), msgspec.structs.replace(facts, fingerprint="model|bfloat16|8 threads"))
    assert "no profile is stored for model|bfloat16|8 threads" in told
    assert 1e-3 < model.rows_s(1) < 0.1
    source = roofline(
        MODELS["llama-3-8b"], MachineRates(linear_flops=1e14, attention_flops=1e14, bandwidth=1e12)
    ).source
    save(source, tmp_path / "profile.json")
    model, told = latency_model(VllmSettings(profile=tmp_path / "profile.json"), facts)
    assert "profile.json" in told
    with pytest.raises(ConfigError, match="cannot read the latency profile"):
        latency_model(VllmSettings(profile=tmp_path / "none.json"), facts)


def test_a_processor_that_others_use_too_is_timed_by_the_tries_that_they_leave_alone() -> None:
    """Before, four tries at the start of several servers at once gave a fortieth of the speed."""
    now, durations = 0.0, iter([0.04] * 19 + [0.001] + [0.04] * 80)

    def work() -> None:
        nonlocal now
        now += next(durations)

    assert _best_s(work, lambda: now) == pytest.approx(0.001)
    durations = iter([0.5] * 80)
    assert _best_s(work, lambda: now) == pytest.approx(0.5)
    assert len([*durations]) >= 75, "a slow machine must not be probed for long"


def test_a_checkpoint_of_unknown_shape_is_taken_for_an_8b_model() -> None:
    facts = EngineFacts(hf_config={"d_model": 5}, dtype_bytes=4, device_name="cpu", pipeline_parallel=2)
    shape, told = model_shape(facts)
    assert (shape.layers, shape.dtype_bytes) == (16, 4)
    assert "lacks" in told


def test_the_package_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; import headway.policy.hosted.driver, headway.vllm.latency, headway.vllm.plugin;"
        "import headway.vllm; headway.vllm.SloMiddleware;"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
