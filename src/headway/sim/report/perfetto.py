"""Trace events of a simulation, for ui.perfetto.dev: a process for each replica, a thread for each pipeline stage (of
each KV group), a slice for each batch, and an instant where a KV group joins a request.

A track of requests (arrival to end, with their first token) and a counter of decodes come beside them. Times are
microseconds, as the format requires.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from headway.sim.report.live_trace import REQUESTS, meta_event, microseconds
from headway.sim.result import SimResult


def trace_events(result: SimResult) -> dict[str, Any]:
    """Return the JSON object that Perfetto and chrome://tracing load. Needs a result with iterations kept."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(result), *_batches(result), *_joins(result), *_requests(result)],
    }


def _names(result: SimResult) -> Iterator[dict[str, Any]]:
    yield meta_event("process_name", REQUESTS, 0, "requests")
    for replica in range(len(result.replicas)):
        yield meta_event("process_name", replica + 1, 0, f"replica {replica}")
        for group in range(result.groups):
            for stage in range(result.stages):
                name = f"group {group} stage {stage}" if result.groups > 1 else f"stage {stage}"
                yield meta_event("thread_name", replica + 1, _lane(result, group, stage), name)


def _lane(result: SimResult, group: int, stage: int) -> int:
    return group * result.stages + stage + 1


def _batches(result: SimResult) -> Iterator[dict[str, Any]]:
    for row in result.iterations:
        chunks = ", ".join(f"{name}[{start}:{start + tokens}]" for name, start, tokens in row.chunks)
        words = f"{row.decodes} decodes" + (f" ×{row.repeats}" if row.repeats > 1 else "")
        name = f"{sum(tokens for _, _, tokens in row.chunks)} prefill + {words}" if row.chunks else words
        for group, (stage, (start_s, end_s)) in itertools.product(row.groups, enumerate(row.stages)):
            # repeated decodes are one slice up to the last repetition
            until_s = row.done_s if row.repeats > 1 else end_s
            yield {
                "ph": "X",
                "name": name,
                "cat": "prefill" if row.chunks else "decode",
                "pid": row.replica + 1,
                "tid": _lane(result, group, stage),
                "ts": microseconds(start_s),
                "dur": microseconds(until_s - start_s),
                "args": {
                    "batch": row.batch,
                    "chunks": chunks,
                    "kv": row.decode_kv,
                    "predicted_ms": row.predicted_s * 1e3,
                },
            }
        yield {
            "ph": "C",
            "name": "decodes",
            "pid": row.replica + 1,
            "tid": 0,
            "ts": microseconds(row.stages[0][0]),
            "args": {"decodes": row.decodes},
        }


def _joins(result: SimResult) -> Iterator[dict[str, Any]]:
    for join in (join for use in result.replicas for join in use.joins):
        yield {
            "ph": "i",
            "s": "t",
            "name": f"group {join.group} joins {join.request}",
            "pid": join.replica + 1,
            "tid": _lane(result, join.group, 0),
            "ts": microseconds(join.at_s),
            "args": {"from_token": join.start, "groups": join.groups},
        }


def _requests(result: SimResult) -> Iterator[dict[str, Any]]:
    for record in result.records:
        name = f"{record.klass or 'request'} {record.id}"
        common = {"cat": record.klass or "request", "id": record.id, "pid": REQUESTS, "tid": 0, "name": name}
        # failed requests end with their last token, rejected ones on arrival
        ends = (record.finish_s, record.token_s[-1] if record.token_s else None, record.arrival_s)
        end_s = next(end for end in ends if end is not None)
        args = {"prompt": record.prompt_tokens, "output": record.output_tokens, "error": record.error or ""}
        yield {**common, "ph": "b", "ts": microseconds(record.arrival_s), "args": args}
        if record.token_s:
            yield {**common, "ph": "n", "ts": microseconds(record.token_s[0]), "args": {"what": "first token"}}
        yield {**common, "ph": "e", "ts": microseconds(end_s)}
