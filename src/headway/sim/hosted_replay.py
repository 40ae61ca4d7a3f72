"""Replay of a hosted policy's log (`policy.hosted.driver_log`): the vLLM plug-in's decisions, without vLLM.

The host's answers about blocks come from the log. Each decision must be the recorded one, with the same prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.core.request import Request
from headway.perf.latency.base import BatchLoad
from headway.perf.latency.corrected import load_terms
from headway.policy.hosted.driver import PolicyDriver, StepPlan
from headway.policy.hosted.reserved_kv_pool import ReservedKvPool
from headway.policy.iteration.decision import IterationPolicy
from headway.sim.replayed_run import (
    BatchTimes,
    ReplayedChunk,
    ReplayedPreemption,
    ReplayedRun,
    ReplayedStep,
    RequestTimes,
    limit_of_chunk,
    request_of,
    short_of_kv,
    waiting_rules,
)

Event = Mapping[str, Any]


class _HostRequest:
    """The attributes of vLLM's request that a driver reads."""

    def __init__(self, facts: Request) -> None:
        self.request_id = facts.id
        self.num_tokens = facts.prompt_tokens
        self.num_computed_tokens = facts.cached_tokens
        self.is_prefill_chunk = True


class _RecordedStep:
    """One step from its decision to its results."""

    def __init__(self, event: Event, plan: StepPlan, aim_s: float | None) -> None:
        self.event, self.plan, self.aim_s = event, plan, aim_s
        self.load = BatchLoad()
        self.chunks: tuple[ReplayedChunk, ...] = ()
        self.decodes: frozenset[str] = frozenset()
        # Prompts that had their last chunk in it, and decodes.
        self.yielding: list[str] = []
        self.short_of_kv: dict[str, int] = {}
        self.rules: dict[str, str] = {}


class HostedReplay:
    """The state of one replay. `on_<event>` applies an event of the log."""

    def __init__(self, replayed: ReplayedRun, blocks: int, detail: bool) -> None:
        self.replayed, self.detail, self.blocks = replayed, detail, blocks
        self.times = RequestTimes(replayed)
        # The host's answers in the current event.
        self._free = 0
        self._needs: dict[tuple[str, int], int] = {}
        self._driver = self._make_driver()
        self._requests: dict[str, _HostRequest] = {}
        self._decisions: dict[int, _RecordedStep] = {}
        # Requests that have not ended; the end of the latest step, None while there are none; and the arrival that
        # ended such a time, until its first step ends.
        self._open: set[str] = set()
        self._done_s: float | None = None
        self._woken_at_s: float | None = None

    def _make_driver(self) -> PolicyDriver:
        run = self.replayed
        pool = ReservedKvPool(
            self.blocks,
            run.kv_tokens,
            lambda: self._free,
            lambda name, tokens: self._needs.get((name, tokens), 0),
            run.block_tokens,
        )
        return PolicyDriver(IterationPolicy(run.config, run.model, pool), pool)

    def _answers(self, event: Event) -> None:
        """Take over the host's answers."""
        self._free = event.get("free", self._free)
        self._needs = {(name, tokens): blocks for name, tokens, blocks in event.get("needs", ())}

    def on_rebuild(self, _: Event) -> None:
        self._driver = self._make_driver()

    def on_add(self, event: Event) -> None:
        self._answers(event)
        facts = request_of(event)
        if not self._open:
            self._done_s, self._woken_at_s = None, event["at_s"]
        self._open.add(facts.id)
        running = event.get("running", False)
        request = self._requests[facts.id] = _HostRequest(facts)
        if facts.id not in self.times:  # else the policy was made anew
            self.times.arrived(facts)
        self._driver.enter(facts, request, running)

    def on_preempt(self, event: Event) -> None:
        self._answers(event)
        request = self._requests[event["request"]]
        request.num_tokens, request.num_computed_tokens, request.is_prefill_chunk = event["tokens"], 0, True
        self._driver.lost(request)
        self.replayed.preemptions.append(ReplayedPreemption(request.request_id, event["at_s"], event["tokens"]))

    def on_end(self, event: Event) -> None:
        name = event["request"]
        self._driver.ended(name)
        self._requests.pop(name, None)
        self._open.discard(name)
        self.times.ended(name, None, "aborted" if event.get("aborted") else None)

    def on_schedule(self, event: Event) -> None:
        self._answers(event)
        policy = self._driver.policy
        aim_s = policy.budget_s(event["at_s"]) if self.detail else None
        load = event["decodes"], event["rows"], event["kv_sum"]
        barred = frozenset(event.get("barred", ()))
        plan = self._driver.plan(*load, event["at_s"], event["admits_new"], barred)
        step, ours = event["id"], [list(quota) for quota in plan.quotas.items()]
        if ours != [list(quota) for quota in event["quotas"]]:
            self.replayed.differences.append(f"step {step} gave {event['quotas']}, and here {ours}")
        elif plan.predicted_s != event["predicted_s"]:
            self.replayed.differences.append(
                f"step {step} was to take {event['predicted_s']} s, and here {plan.predicted_s} s"
            )
        decision = self._decisions[step] = _RecordedStep(event, plan, aim_s)
        if self.detail:
            decision.short_of_kv = short_of_kv([policy])
            decision.rules = waiting_rules(policy, plan.quotas, event["at_s"])
        # Steps that were never carried out have no further events.
        self._decisions.pop(step - 64, None)

    def on_scheduled(self, event: Event) -> None:
        self._answers(event)
        decision = self._decisions[event["id"]]
        tokens = {name: count for name, _, count, _ in event["chunks"]}
        if self.detail:
            decision.chunks = tuple(self._chunk(decision, chunk, event) for chunk in event["chunks"])
        decision.decodes = frozenset(self._driver.decoding.keys() - set(event.get("left_out", ())))
        decision.yielding = [*decision.decodes, *(name for name, *_, last in event["chunks"] if last)]
        for name, start, count, last in event["chunks"]:
            request = self._requests[name]
            request.num_computed_tokens, request.is_prefill_chunk = start + count, not last
            self.times.scheduled(name, decision.event["at_s"])
        decision.load = self._driver.advance(decision.plan, tokens, event["others"], event["rows"])

    def on_batch(self, event: Event) -> None:
        decision = self._decisions.pop(event["id"], None)
        if decision is None:
            return
        at_s, elapsed_s = event["at_s"], event["elapsed_s"]
        ended = set(event["ended"])
        for name in sorted(decision.yielding):
            self.times.token(name, at_s)
            if name in ended:
                self.times.ended(name, at_s, None)
        self._open -= ended
        waited_s = max(0.0, at_s - elapsed_s - self._done_s) if self._done_s is not None else 0.0
        woken_s = at_s - self._woken_at_s if self._woken_at_s is not None else None
        self._done_s, self._woken_at_s = at_s, None
        terms = load_terms(self.replayed.table, decision.load, decision.load.chunk_scale or 1.0)
        self.replayed.batches.append(BatchTimes(event["predicted_s"], sum(terms), elapsed_s, waited_s, terms, woken_s))
        if decision.aim_s is not None:
            self.replayed.steps.append(
                ReplayedStep(
                    event["id"],
                    decision.event["at_s"],
                    at_s - elapsed_s,
                    at_s,
                    event["predicted_s"],
                    decision.aim_s,
                    decision.decodes,
                    decision.chunks,
                    decision.short_of_kv,
                    rules=decision.rules,
                )
            )
        self._driver.observed(decision.load, elapsed_s)

    def _chunk(self, decision: _RecordedStep, chunk: tuple[str, int, int, bool], event: Event) -> ReplayedChunk:
        name, start, tokens, last = chunk
        remaining = tokens if last else self._requests[name].num_tokens - start
        rows = event["rows"] + sum(count for _, _, count, _ in event["chunks"])
        other = decision.plan.quotas.get(name) != tokens
        limit = limit_of_chunk(self.replayed.config, tokens, remaining, rows, other)
        return ReplayedChunk(name, start, tokens, remaining, last, limit)
