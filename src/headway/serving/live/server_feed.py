"""The live page of a server: its engine's samples and its requests' records, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import UnavailableError
from headway.runtime.cluster.cluster_report import InstanceAdmin
from headway.runtime.engine.protocol import EngineClient, EngineSamples, SampledEngine
from headway.serving.errors import ApiError
from headway.serving.generation_record import GenerationRecord
from headway.serving.live.feed import FollowedRequest, InstanceLoad, LiveFeed, instance_loads
from headway.vllm.log_explanation import LogExplainer


class ServerFeed:
    """The `LivePage` of one server. event_log: of its only engine; explanations then come from a replay of it."""

    def __init__(self, engine: EngineClient, event_log: Path | None) -> None:
        self.feed = LiveFeed()
        self._engine = engine
        self._explainer = None if event_log is None else LogExplainer()
        self._event_log = event_log
        if isinstance(engine, SampledEngine):
            engine.on_samples(self._sampled)

    def follow(self, name: str, record: GenerationRecord) -> None:
        """Follow a request by its record. name: its id in the engine."""
        feed, first, gap, finish, reject = (
            self.feed, record.on_first, record.on_gap, record.on_finish, record.on_reject,
        )  # fmt: skip

        def on_first(of: GenerationRecord, seconds: float, tokens: int) -> None:
            first(of, seconds, tokens)
            feed.tokens(name, of.received_s + seconds, tokens)

        def on_gap(of: GenerationRecord, seconds: float, tokens: int) -> None:
            gap(of, seconds, tokens)
            feed.tokens(name, (of.last_token_s or of.received_s) + seconds, tokens)

        def on_finish(of: GenerationRecord) -> None:
            finish(of)
            objectives = of.objectives()
            met = all(objectives.values()) if objectives else None
            feed.ended(name, time.monotonic(), str(of.reason), met)

        def on_reject(status: int) -> None:
            reject(status)
            feed.ended(name, time.monotonic(), f"refused with {status}", None)

        record.on_first, record.on_gap, record.on_finish, record.on_reject = on_first, on_gap, on_finish, on_reject
        slo = record.slo
        feed.arrived(
            FollowedRequest(name, record.request_class, record.received_s, record.prompt_tokens, slo.ttft_s, slo.tbt_s)
        )

    def page(self, after: int, bucket: int, at_s: float | None) -> dict[str, Any]:
        """See `LivePage`."""
        now = time.monotonic()
        self._refresh(now)
        return {**self.feed.page(now, after, bucket), "title": self._title(), "state": self._engine.state}

    async def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """See `LivePage`."""
        if self._explainer is not None and self._event_log is not None:
            # A restarted engine writes a log of its own.
            restarts = self._engine.stats.engine_restarts_total
            log = Path(f"{self._event_log}.{restarts}") if restarts else self._event_log
            status, body = await self._explainer.explain(log, request_id, under)
            if status != 200:
                raise ApiError(status, body["error"]["message"])
            return body
        if under:
            raise ApiError(400, "counterfactuals need the decisions: serve one engine with --event-log FILE", "under")
        explain = self.feed.explanation(request_id)

        def work() -> dict[str, Any]:
            from headway.sim.report.why_text import why_json  # brings numpy

            return why_json(explain())

        return await asyncio.to_thread(work)

    def _sampled(self, instance: int, samples: EngineSamples) -> None:
        self.feed.sampled(instance, samples)
        self._refresh(time.monotonic())

    def _refresh(self, now: float) -> None:
        engine, feed = self._engine, self.feed
        try:
            info = engine.info
        except UnavailableError:
            return
        feed.policy, feed.aim_s, feed.long_tokens = info.policy, info.t_target_s, info.long_tokens
        stats = engine.stats
        if isinstance(engine, InstanceAdmin):
            feed.instances = instance_loads(engine.report().instances)
        else:
            load = InstanceLoad(0, "engine", engine.state, stats.kv_tokens_used, stats.kv_tokens_total)
            load.running, load.waiting = stats.running, stats.waiting
            feed.instances = [load]
        total = stats.kv_tokens_total
        feed.loaded(now, stats.waiting, stats.running, stats.kv_tokens_used / total if total else 0.0)

    def _title(self) -> str:
        try:
            return self._engine.info.model
        except UnavailableError:
            return "starting"
