"""Measurement of a vLLM engine's steps: `headway profile --vllm` runs this module in vLLM's environment.

The engine runs in this process, with vLLM's own scheduler, whose token budget is set before each step: so a step holds
exactly the chunk in question. A step's time is that from `schedule()` to the end of `update_from_output()`, as the
plug-in measures it. Steps are synchronous.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency import table
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.table import ServingOverhead, StepSample, TableLatency, median_error, step_table

CHUNKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
"""Chunk sizes to measure, tokens."""
PASTS = (512, 2048, 8192, 32768, 131072)
"""Histories before a chunk, tokens."""
DECODES = ((1, 64), (1, 2048), (4, 64), (4, 1024), (16, 64), (16, 512), (64, 64), (256, 32))
"""Groups of decodes: (requests, prompt tokens of each)."""
MIXED = ((4, 256), (16, 64))
"""Groups of decodes beside which chunks are measured, to check the table: they are no part of the fit."""
_MOST_PASSES, _DECODE_STEPS = 8, 8
_PAUSES, _PAUSE_S, _WOKEN_CHUNK = 8, 0.5, 64
"""Pauses after which a chunk of so many tokens is measured."""
_IN_A_ROW = 32
"""Steps of decodes between which the engine's own time is measured."""
_LEAST_LARGEST = 256
"""Chunk size up to which all are measured, however slow the engine is."""


class StepProbe:
    """One engine whose steps are sized one by one.

    engine: vLLM's LLMEngine in this process; make_params: returns sampling parameters for a number of output tokens;
    budget_s: about how long to measure.
    """

    def __init__(self, engine: Any, make_params: Callable[[int], Any], budget_s: float, seed: int = 0) -> None:
        self.samples: list[StepSample] = []
        self.mixed: list[StepSample] = []
        self._start_s, self._budget_s = time.perf_counter(), budget_s
        self._engine, self._make_params, self._random = engine, make_params, random.Random(seed)
        self._scheduler = engine.engine_core.engine_core.scheduler
        config = engine.vllm_config
        self._vocabulary = config.model_config.get_vocab_size()
        self._limit: int = self._scheduler.max_num_scheduled_tokens
        # Room for outputs beside the prompt.
        self.most_prompt = config.model_config.max_model_len - 2 * _DECODE_STEPS
        self.kv_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size - 4 * self._limit
        self.most_requests = config.scheduler_config.max_num_seqs
        # Seconds of chunks (tokens, seconds) after a pause, and between two steps in a row.
        self.woken: list[tuple[int, float]] = []
        self.between: list[float] = []
        self._began_s = self._ended_s = self._seconds = 0.0
        self._names = 0
        self._time_steps()

    @property
    def chunks(self) -> list[int]:
        """Chunk sizes that this engine's steps can hold."""
        return [size for size in CHUNKS if size <= min(self._limit, self.most_prompt)]

    def measure(self) -> None:
        """Measure all points, again and again while another pass fits the budget: disturbances of seconds differ."""
        self.measure_fresh_chunks()
        # The first runs of each shape only warm up.
        self.samples.clear()
        for turn in range(1, _MOST_PASSES + 1):
            self.measure_fresh_chunks()
            self.measure_histories()
            self.measure_decodes()
            self.measure_mixed()
            if self._late(turn / (turn + 1)):
                break
        self.measure_serving()

    def measure_fresh_chunks(self) -> None:
        """Measure each chunk size without history; a slow engine's larger ones are left out."""
        for size in self.chunks:
            self._add(size, 1)
            self.samples.append(StepSample(size, 0, 0, 0, self._step(size)))
            self._drain()
            if size >= _LEAST_LARGEST and self._late(0.3):
                return

    def measure_histories(self) -> None:
        """Measure some chunk sizes over each history, on the way through one long prompt."""
        most = min(self.most_prompt, self.kv_tokens)
        sizes = [size for size in self.chunks[::-3] if size <= most // 8]
        last = most - sum(sizes) - 1
        if not sizes or last < PASTS[0]:
            return
        name, past = self._add(most, 1), 0
        for goal in [*(each for each in PASTS if each + sum(sizes) < last), last]:
            while past < goal:
                step = min(self._limit, goal - past)
                self._step(step)
                past += step
            for size in sizes:
                # Histories differ by what was measured before at this goal: noted as they were.
                self.samples.append(StepSample(size, past, 0, 0, self._step(size)))
                past += size
            if self._late(0.6):
                break
        self._end([name])

    def measure_decodes(self) -> None:
        """Measure groups of decodes."""
        for requests, prompt in self._groups(DECODES):
            names = self._decoding(requests, prompt)
            for _ in range(_DECODE_STEPS // 4):
                kv = self._kv_tokens(names)
                self.samples.append(StepSample(0, 0, requests, kv, self._step(self._limit)))
            self._end(names)
            if requests > 1 and self._late(0.8):
                return

    def measure_mixed(self) -> None:
        """Measure chunks beside decodes."""
        for requests, prompt in self._groups(MIXED):
            for size in [size for size in self.chunks if 8 <= size <= self._limit - requests]:
                names = self._decoding(requests, prompt)
                names.append(self._add(size, 2))
                kv = self._kv_tokens(names[:-1])
                self.mixed.append(StepSample(size, 0, requests, kv, self._step(size + requests)))
                self._end(names)
                if self._late(1.0):
                    return

    def measure_serving(self) -> None:
        """Measure what a table of steps in a row leaves out: the first step after a pause, and the time between."""
        size = max(size for size in self.chunks if size <= _WOKEN_CHUNK)
        for _ in range(_PAUSES):
            time.sleep(_PAUSE_S)
            self._add(size, 1)
            self.woken.append((size, self._step(size)))
            self._drain()
        name = self._add(size, _IN_A_ROW)
        while self._scheduler.requests[name].num_output_tokens == 0:
            self._step(self._limit)
        for _ in range(_IN_A_ROW - 2):
            before_s = self._ended_s
            self._step(self._limit)
            self.between.append(self._began_s - before_s)
        self._end([name])

    def overhead(self, latency: LatencyModel) -> ServingOverhead:
        """Return what serving adds to the steps of this table. Requests' way over HTTP is not measured here."""
        predicted = [(latency.rows_s(size) + latency.attention_s(0, size), seconds) for size, seconds in self.woken]
        # By itself: no time between steps is in a step's, which `of` would take off.
        idle_s = ServingOverhead.of((), [took - said for said, took in predicted], ()).idle_s
        return msgspec.structs.replace(ServingOverhead.of((), (), self.between), idle_s=idle_s)

    # -- the engine ---------------------------------------------------------------------------------------------

    def _groups(self, groups: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the groups that fit this engine with their outputs."""
        possible = [(n, prompt) for n, prompt in groups if n < min(self.most_requests, self._limit)]
        most = self.most_prompt + 2 * _DECODE_STEPS
        return [
            (n, prompt)
            for n, prompt in possible
            if prompt + self._outputs(n, prompt) <= most and n * (prompt + self._outputs(n, prompt)) < self.kv_tokens
        ]

    def _outputs(self, requests: int, prompt: int) -> int:
        """Return how many tokens each of a group must make for all to decode at once while they are measured.

        The first begin to decode while the prompts of the last are still computed, beside at most `requests` decodes.
        """
        return requests * prompt // (self._limit - requests) + 2 + 2 * _DECODE_STEPS

    def _decoding(self, requests: int, prompt: int) -> list[str]:
        """Add requests, and return their names when all of them decode."""
        names = [self._add(prompt, self._outputs(requests, prompt)) for _ in range(requests)]
        while any(self._scheduler.requests[name].num_output_tokens == 0 for name in names):
            self._step(self._limit)
        return names

    def _kv_tokens(self, names: Sequence[str]) -> int:
        return sum(self._scheduler.requests[name].num_tokens for name in names)

    def _add(self, tokens: int, outputs: int) -> str:
        """Add a request with a random prompt; return its name in the scheduler."""
        self._names += 1
        prompt = [self._random.randrange(self._vocabulary) for _ in range(tokens)]
        before = set(self._scheduler.requests)
        self._engine.add_request(f"probe{self._names}", {"prompt_token_ids": prompt}, self._make_params(outputs))
        (name,) = set(self._scheduler.requests) - before
        return str(name)

    def _end(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names), internal=True)
        self._drain()

    def _drain(self) -> None:
        """Step until no request is left, also none that has ended in the workers."""
        while self._scheduler.has_requests():
            self._step(self._limit)

    def _step(self, tokens: int) -> float:
        """Run one step of at most `tokens`; return its seconds."""
        self._scheduler.max_num_scheduled_tokens = tokens
        self._engine.step()
        self._scheduler.max_num_scheduled_tokens = self._limit
        return self._seconds

    def _late(self, share: float) -> bool:
        """Whether the time for the first `share` of the measurements is over."""
        return time.perf_counter() > self._start_s + share * self._budget_s

    def _time_steps(self) -> None:
        """Time the scheduler's steps."""
        schedule, update = self._scheduler.schedule, self._scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            self._began_s = time.perf_counter()
            return schedule(*args, **kwargs)

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            self._ended_s = time.perf_counter()
            self._seconds = self._ended_s - self._began_s
            return outputs

        self._scheduler.schedule, self._scheduler.update_from_output = timed_schedule, timed_update


def main(words: Sequence[str] | None = None) -> None:
    """Measure an engine of these flags, and store its table."""
    # The engine must run in this process: its scheduler is driven step by step.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    from headway.vllm import adapter

    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="headway profile --vllm"))
    parser.add_argument("--headway-budget", type=float, required=True)
    parser.add_argument("--headway-out", type=Path)
    given = parser.parse_args(words)
    arguments = EngineArgs.from_cli_args(given)
    arguments.skip_tokenizer_init, arguments.async_scheduling = True, False
    arguments.enable_prefix_caching = False
    engine = LLMEngine.from_engine_args(arguments)
    config = engine.vllm_config
    if not config.scheduler_config.enable_chunked_prefill:
        raise SystemExit("headway: error: this engine does not split prompts into chunks: there is nothing to profile")
    mark = adapter.engine_facts(config).fingerprint
    began_s = time.perf_counter()
    probe = StepProbe(
        engine,
        lambda n: SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False),
        given.headway_budget,
    )
    probe.measure()
    words_of = f"{len(probe.samples)} steps of vLLM {adapter.version()} in {time.perf_counter() - began_s:.0f} s"
    try:
        source = step_table(probe.samples, mark, words_of)
    except ConfigError as error:
        raise SystemExit(f"headway: error: {error}") from error
    latency = TableLatency(source)
    source = msgspec.structs.replace(source, serving=probe.overhead(latency))
    path = given.headway_out or table.default_path(mark)
    table.save(source, path)
    print(f"measured {words_of}: {mark}")
    print(f"error, median: {median_error(latency, probe.samples):.1%} of the steps that were fitted", end="")
    print(
        f"; {median_error(latency, probe.mixed):.1%} of {len(probe.mixed)} steps of a chunk beside decodes, not fitted"
    )
    print(f"beside its steps the engine takes {probe.overhead(latency).words()}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
