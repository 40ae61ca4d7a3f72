"""The fault explorer: a scheduler under random faults from a seed, checked after every step.

Scheduler, block manager and simulated executor run through random arrivals, aborts, losses of the instance, KV pools
that are too small, clocks that jump forward, and iterations that take 0.5 to 1.5 times the predicted time. An audit
follows the batches alone: which tokens of each request have been computed since its KV was last lost, and how many
blocks it holds. A seed that fails is reported, and fails again when it is run again.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from headway.core.batch import Batch, GroupBatch
from headway.core.errors import InvariantError
from headway.core.request import Request, Slo
from headway.kv.allocator import BlockTables
from headway.perf.latency.groups import ShardExchangeCost
from headway.perf.latency.table import TableLatency, TableSource
from headway.policy.iteration.budget import LEAST_GAIN, LONGEST_WAIT_S, reference_aim_s
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig
from headway.sim.cohorts import DecodeTrack
from headway.sim.engine import RunningBatch, SimulatedEngine
from headway.sim.spec import InstanceSpec, NoiseSource, NoiseSpec, StageLink
from headway.sim.workload import TraceRequest

BLOCK = 16
NEVER = float("inf")


def explore(seeds: Iterable[int], report: Callable[[str], None]) -> int:
    """Run every seed and report failures. Return the exit code: 0 when no seed failed, else 1."""
    tried = failed = steps = 0
    for seed in seeds:
        tried += 1
        try:
            steps += FaultWorld(seed).run()
        # no invariant may be violated in any way: an AssertionError counts as much as an InvariantError
        except Exception as error:
            failed += 1
            report(f"seed {seed}: {type(error).__name__}: {error}  (again: python -m tests.helpers.faults {seed})")
    report(f"{tried} seeds, {steps} steps, {failed} failed")
    return 1 if failed else 0


def small_machine() -> TableLatency:
    """Return a latency model of small numbers: 1 ms an iteration, 20 µs a row, attention that grows with the cache."""
    source = TableSource(
        fingerprint="",
        provenance="fault explorer",
        tokens=((0, 1e-3), (1, 1.02e-3), (1001, 21.02e-3)),
        chunks=((0, 0.0, 0.0), (1000, 1e-3, 2e-5)),
        decode=(1e-4, 1e-5, 2e-7),
    )
    return TableLatency(source, 4096)


def random_config(rng: random.Random, **fields: Any) -> SchedulerConfig:
    """Return settings with a random policy, under Medha's rules or not, on top of `fields`."""
    policy = rng.choice(("ladder", "ladder", "ladder", "fcfs", "edf", "lrs", "srpt", "lars", "lars"))
    if policy == "ladder":
        return SchedulerConfig(policy=policy, **fields)
    rules = MedhaConfig(space_sharing=policy == "lars" or rng.random() < 0.5, long_tokens=200)
    medha = rules if policy == "lars" or rng.random() < 0.5 else None
    return SchedulerConfig.named(rng.choice(("default", "default", "paper")), policy=policy, medha=medha, **fields)


def random_spec(rng: random.Random) -> InstanceSpec:
    """Return an instance of random policy, chunking, pipeline and mode, with a KV pool that decodes exhaust."""
    config = random_config(
        rng,
        chunking=rng.choice(("adaptive", "adaptive", "static:96", "whole")),
        t_target_s=rng.choice((0.004, 0.01, 0.02)),
        max_num_seqs=rng.choice((3, 8, 64)),
        max_num_batched_tokens=rng.choice((64, 256, 2048)),
        stages=rng.choice((1, 1, 2, 3)),
        pipeline_schedule=rng.choice(("stream", "microbatch")),
    )
    spec = InstanceSpec(
        config=config,
        latency=small_machine(),
        kv_tokens=rng.choice((640, 960, 1600)),
        block_tokens=BLOCK,
        link=StageLink(rng.choice((0.0, 2e-4)), 1e-6),
        learns=rng.random() < 0.25,
    )
    groups = rng.choice((1, 1, 2, 3))
    if groups == 1:
        return spec
    config = replace(config, kv_parallel=groups, kv_shard_tokens=rng.choice((64, 160, None)))
    return replace(spec, config=config, kv_tokens=spec.kv_tokens // groups, exchange=ShardExchangeCost(1e-4, 1e-6))


class _RequestAudit:
    """Tokens of one request that batches have computed since its KV was last lost: [0, cursor)."""

    __slots__ = ("base", "cursor")

    def __init__(self) -> None:
        self.cursor = 0
        # first token of its last KV shard: that shard's group holds [base, cursor)
        self.base = 0


class _AuditedReplica(SimulatedEngine):
    """A replica whose batches are checked against the audit before they run."""

    def _start(self, batch: Batch, now: float, quiet_s: float) -> RunningBatch:
        self.scheduler.check()
        # all KV operations first: a part may read what another part's operations have reserved
        for part in batch.parts:
            self.replay(part)
        for part in batch.parts:
            self.watch(part)
        self.budget(batch)
        run = super()._start(batch, now, quiet_s)
        for part in batch.parts:
            for name in part.decodes.members:
                # `watch` has counted one token; fast-forward computes the others without a batch of their own
                self.audits[name].cursor += run.repeats - 1
        return run

    def begin(self) -> None:
        self.audits: dict[str, _RequestAudit] = {}
        self.forget()

    def forget(self) -> None:
        """Start with empty block tables, as after a loss."""
        self.tables = [BlockTables(manager.n_blocks) for manager in self.block_managers]

    def replay(self, part: GroupBatch) -> None:
        """Apply a part's KV operations. A reservation from token 0 starts a request anew, any other one a shard."""
        tables = self.tables[part.group]
        for op in part.kv_ops:
            tables.apply(op)
            if op.verb == "free":
                continue
            audit = self.audits.get(op.request, _RequestAudit())
            if op.verb == "reserve":
                audit.base = op.start
                # from token 0: the request starts again, with nothing computed
                audit.cursor = audit.cursor if op.start else 0
                require(op.start == audit.cursor, op.request, f"has a shard from {op.start}, and {audit.cursor} tokens")
        tables.check()

    def watch(self, part: GroupBatch) -> None:
        """Advance the audit by a part. Raises InvariantError when the part contradicts it."""
        tables = self.tables[part.group]
        for name in part.decodes.members:
            audit, track = self.audits[name], self.tracks[name]
            require(audit.cursor >= track.request.prompt_tokens, name, "decodes before its prompt is computed")
            audit.cursor += 1
        kv = sum(self.audits[name].cursor - self.audits[name].base for name in part.decodes.members)
        require(kv == part.decodes.kv_sum, "the batch", f"reads {kv} KV tokens and says {part.decodes.kv_sum}")
        longs, medha = 0, self.spec.config.medha_rules
        for chunk in part.prefills:
            audit, track = self.audits[chunk.request], self.tracks[chunk.request]
            require(chunk.start == audit.cursor, chunk.request, f"computes from {chunk.start}, not {audit.cursor}")
            audit.cursor += chunk.tokens
            # Medha's rules give at most one long prefill tokens
            longs += medha is not None and track.request.prompt_tokens > medha.long_tokens
        require(longs <= 1, "the batch", f"holds {longs} long prefills")
        for name in (*part.decodes.members, *(chunk.request for chunk in part.prefills)):
            held, audit = sum(count for _, count in tables.runs(name)) * BLOCK, self.audits[name]
            require(audit.cursor - audit.base <= held, name, f"has tokens {audit.base}..{audit.cursor} in {held} slots")

    def budget(self, batch: Batch) -> None:
        """Require a predicted time within the target, unless decodes alone exceed it or one smallest chunk runs."""
        config, chunks = self.spec.config, [chunk for part in batch.parts for chunk in part.prefills]
        idle = any(not part.prefills for part in batch.parts)  # its decodes alone may exceed it
        if config.chunking != "adaptive" or not chunks or (idle and len(batch.parts) > 1):
            return
        # an iteration may take `LEAST_GAIN` times the cost of one row, however low the target is
        one_s = self.latency.rows_s(1)
        completes = any(chunk.last for chunk in chunks)
        target_s = reference_aim_s(config, self.latency)
        if not any(part.decodes.members for part in batch.parts):
            target_s = max(target_s, LONGEST_WAIT_S)
        budget_s = max(target_s, LEAST_GAIN * one_s) * (1 + 1e-9)
        # under Medha's rules a chunk that completes a prompt may exceed the target by `stretch`
        medha = config.medha_rules
        budget_s *= 1.0 + medha.stretch if completes and medha is not None else 1.0
        # a lone chunk of the smallest size is always allowed, so that prefills advance
        alone = len(chunks) == 1 or len(batch.parts) > 1
        progress = alone and any(chunk.tokens <= max(1, config.min_chunk) for chunk in chunks)
        require(batch.predicted_s <= budget_s or progress, "the batch", f"takes {batch.predicted_s} s of {budget_s}")


def require(holds: bool, subject: str, what: str) -> None:
    """Raise InvariantError unless it holds."""
    if not holds:
        raise InvariantError(f"{subject} {what}")


class FaultWorld:
    """The run of one seed. `run` returns the number of steps, or raises InvariantError."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        spec = random_spec(rng)
        noise = NoiseSource(NoiseSpec("uniform", 0.5), f"faults {seed}")
        self.replica = _AuditedReplica(0, spec, noise, rng.random() < 0.5, None)
        self.replica.begin()
        self.aborts, self.losses, self.jumps = (rng.choice((0.0, 0.01, 0.1)) for _ in range(3))
        self.tracks = self._plan(spec)
        # far more steps than any schedule without starvation takes
        self.limit = 2000 + 60 * sum(t.request.prompt_tokens + t.left for t in self.tracks)

    def run(self) -> int:
        rng, replica = self.rng, self.replica
        coming = sorted(self.tracks, key=lambda track: -track.request.arrival_s)
        events: list[tuple[float, int]] = []
        now, steps, lost = 0.0, 0, 0
        while coming or events or replica.tracks:
            steps += 1
            require(steps < self.limit, "the world", "does not end: a request starves")
            arrival_s = coming[-1].request.arrival_s if coming else NEVER
            at_s = min(arrival_s, events[0][0] if events else NEVER)
            require(at_s < NEVER, "the scheduler", f"runs nothing while {len(replica.tracks)} requests wait")
            # a clock jump makes several events late at once
            now = max(now, at_s) + (rng.expovariate(20.0) if rng.random() < self.jumps else 0.0)
            while events and events[0][0] <= now:
                batch = heapq.heappop(events)[1]
                if batch >= 0:
                    replica.complete(batch, now)
                    replica.scheduler.check()
            while coming and coming[-1].request.arrival_s <= now:
                track = coming.pop()
                replica.audits[track.request.id] = _RequestAudit()
                replica.add(track, now)
            live = [track for track in replica.tracks.values() if track.ended_s is None]
            if live and rng.random() < self.aborts:
                replica.abort(rng.choice(live), now, "aborted")
            if rng.random() < self.losses and lost < 4:
                lost += 1
                # the batches in flight are lost, and their ends with them
                events.clear()
                replica.lose(now)
                replica.forget()
                for audit in replica.audits.values():
                    audit.cursor = audit.base = 0
            replica.scheduler.check()
            for event in replica.start_batches(now, coming[-1].request.arrival_s if coming else NEVER):
                heapq.heappush(events, event)
        return self._end(steps)

    def _end(self, steps: int) -> int:
        replica = self.replica
        require(replica.scheduler.idle, "the scheduler", "is not idle at the end")
        for manager in replica.block_managers:
            require(manager.free_blocks == manager.n_blocks, "a manager", "holds blocks at the end")
        for track in self.tracks:
            name = track.request.id
            require(track.ended_s is not None, name, "never ended")
            count = len(track.times)
            whole = count == max(1, track.source.output_tokens) if track.error is None else True
            require(whole, name, f"got {count} tokens of {track.source.output_tokens}")
            require(track.times == sorted(track.times), name, "got tokens out of order")
        return steps

    def _plan(self, spec: InstanceSpec) -> list[DecodeTrack]:
        rng, at, tracks, capacity = self.rng, 0.0, [], spec.kv_tokens // BLOCK * BLOCK * spec.config.kv_parallel
        for number in range(rng.randint(4, 18)):
            at += rng.expovariate(1 / rng.choice((0.002, 0.02, 0.1)))
            prompt = rng.randint(201, 560) if rng.random() < 0.3 else rng.randint(1, 120)
            # no request is longer than the pool, or it would be rejected: KV of all but the last token is stored
            output = min(rng.choice((1, rng.randint(2, 12), rng.randint(20, 80))), capacity + 1 - prompt)
            request = Request(
                id=f"r{number}",
                arrival_s=at,
                prompt_tokens=prompt,
                max_output_tokens=min(output + rng.choice((0, 20)), capacity + 1 - prompt),
                slo=Slo(ttft_s=rng.choice((None, 0.05, 0.5)), tbt_s=None),
                priority=rng.choice((0, 0, 0, -1, 3)),
            )
            tracks.append(DecodeTrack(request, TraceRequest(at, prompt, output)))
        return tracks


if __name__ == "__main__":
    sys.exit(explore([int(word) for word in sys.argv[1:]], print))
