"""How long things take on one instance of a cluster that a scenario describes: by what its simulation goes by."""

from __future__ import annotations

from collections.abc import Sequence

from tests.helpers.timed.runs import TimedSavedBytes

from headway.core.request import Request, Span, SpanTask
from headway.sim.cluster.backend import predicted_s
from headway.sim.cluster.state import ClusterSpec

_ANY = Request(id="", arrival_s=0.0, prompt_tokens=1, max_output_tokens=1)


class ClusterTimes:
    """`runs.Times` of instance `number`."""

    def __init__(self, spec: ClusterSpec, number: int) -> None:
        self._spec, self._number = spec, number
        self.layers = spec.shape.layers

    def run_s(self, run: SpanTask, before: Sequence[SpanTask]) -> float:
        span = Span(request=_ANY, start=run.start, end=run.end, group=run.group, strategy=run.strategy)
        nodes = len({self._spec.instances[i].node for i in run.group})
        return predicted_s(self._spec, (span,), nodes, before[-1].group if before and not run.in_place else ())

    def send_s(self, tokens: float, to: int) -> float:
        here, there = self._spec.instances[self._number], self._spec.instances[to]
        link = self._spec.links.between(here, there)
        return link.transfer_s(int(tokens * self._spec.shape.kv_bytes_per_token / here.tp))

    def saved(self, run: SpanTask, start: int, end: int, layer: int) -> TimedSavedBytes:
        shape, share = self._spec.shape, len(run.group)
        own = shape.kv_bytes_per_token / share
        return TimedSavedBytes(
            kv_bytes=int(own * (start + (end - start) * layer / shape.layers)),
            activation_bytes=int((end - start) * shape.hidden * shape.dtype_bytes / share) if layer else 0,
            kv_bytes_at_end=int(own * run.end),
        )
