"""What is predicted of an instance is by what that instance has measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
from tests.helpers.cluster_worlds import PerToken
from tests.helpers.fake_engine import INFO
from tests.router.cluster_clients import SHAPE

from headway.core.request import Request, Span
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.cluster.native_backend import LiveBackend
from headway.runtime.cluster.requests import InstanceRegistry
from headway.runtime.engine.protocol import EngineInfo


def _instance(number: int, info: EngineInfo) -> LiveInstance:
    return cast(LiveInstance, SimpleNamespace(number=number, info=info))


def test_each_instance_is_predicted_by_its_own_current_table() -> None:
    infos = [msgspec.structs.replace(INFO, latency={"times": times}) for times in (2.0, 3.0, 4.0)]
    registry = InstanceRegistry([_instance(0, infos[0]), _instance(1, infos[1])])
    asked: list[EngineInfo | None] = []

    def latency_of(info: EngineInfo | None) -> GroupLatency:
        asked.append(info)
        return PerToken() if info is None or info.latency is None else PerToken(info.latency["times"] * 1e-3)

    backend = LiveBackend(registry, latency_of, SHAPE, False, 0, lambda: 0.0)
    request = Request(id="r", arrival_s=0.0, prompt_tokens=1000, max_output_tokens=1)
    alone_s = PerToken().prefill_s(0, 1000, GroupShape(1))
    assert backend.prefill_estimate(request, (0,)) == (1000, 2.0 * alone_s)
    assert backend.prefill_estimate(request, (1,)) == (1000, 3.0 * alone_s)
    span = Span(request=request, start=0, end=1000, group=(1, 0))
    assert backend.span_s([span], 1, ()) == 3.0 * PerToken().prefill_s(0, 1000, GroupShape(2))
    assert len(asked) == 2
    registry.add(_instance(1, infos[2]))  # started again
    assert backend.prefill_estimate(request, (1,)) == (1000, 4.0 * alone_s)
    registry.remove(1)
    assert backend.prefill_estimate(request, (1,)) == (1000, alone_s)
