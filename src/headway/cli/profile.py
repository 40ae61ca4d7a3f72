"""`headway profile [MODEL]`: measure a model's latency on this host, and store the result for `serve`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError, HeadwayError
from headway.core.files import check_outputs
from headway.core.parse import duration
from headway.core.settings import add_options, environment, given_flags, resolve
from headway.runtime.engine.config import EngineConfig, settle
from headway.serving.launch import model_folder
from headway.serving.serve_settings import EngineSettings

HEADLINE_PROMPTS = (2048, 16384)
"""Prompts, in tokens, whose rate the headline has."""
HEADLINE_DEPTHS = (0, 2048, 16384, 131072)
"""Tokens of a document that are computed already, for its next chunk."""

if TYPE_CHECKING:
    from headway.perf.latency.table import TableSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a Hugging Face checkpoint (default: the embedded model)")
    parser.add_argument(
        "--budget", type=duration, default=25.0, metavar="SECONDS", help="measure for about so long (default: 25)"
    )
    parser.add_argument(
        "--serve-for",
        type=duration,
        default=10.0,
        metavar="SECONDS",
        help="then serve a mixture of requests for so long, and correct the table by it (default: 10; 0: do not)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it (default: the cache, where serve looks)"
    )
    add_options(parser, EngineSettings, leave_out=("event_log", "latency_profile"))
    parser.epilog = (
        "Commands of their own, each with --help: `profile check` (predictions beside a recorded run), `profile fit` "
        "(an accelerator's operators), `profile fit-eq1` (Tetris's Eq. (1)), `profile rates` (Tetris's improvement "
        "rates by load), `profile --vllm` (a vLLM engine)."
    )


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.budget < math.inf:
        raise ConfigError(f"--budget must be above 0 seconds, not {arguments.budget:g}")
    if not 0 <= arguments.serve_for < math.inf:
        raise ConfigError(f"--serve-for must be 0 seconds or more, not {arguments.serve_for:g}")
    settings = resolve(EngineSettings, flags=given_flags(EngineSettings, arguments), environment=environment())
    model = model_folder(arguments.model)
    config = EngineConfig(
        model=model,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_memory,
        threads=settings.threads,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        kv_parallel_size=settings.kv_parallel_size,
    )
    settle()
    check_outputs(arguments.out)
    from headway.perf.latency import table
    from headway.runtime.assembly.engine import build, profile_mark
    from headway.runtime.executor import profiling

    built = build(config)
    mark = profile_mark(config, built)
    started = time.perf_counter()
    words = f"measured in {arguments.budget:.0f} s"
    try:
        source = profiling.profile(
            built.measure, built.kv_tokens, profiling.FULL, arguments.budget, mark, words, config.kv_parallel_size
        )
    finally:
        # The model's memory must be free before the live calibration loads it in a server.
        built.executor.close()
    print(f"measured for {time.perf_counter() - started:.1f} s: {source.fingerprint}")
    # Saved before the live calibration, whose failure must not lose the measurement.
    path = arguments.out or table.default_path(mark)
    table.save(source, path)
    if arguments.serve_for > 0:
        from headway.serving.load.calibration import calibrate_live

        try:
            source, iterations = calibrate_live(
                model, settings.model_dump(), built.shape.vocab_size, source, arguments.serve_for
            )
        except HeadwayError as error:
            print(f"headway: warning: could not serve, so the table is as measured: {error}", file=sys.stderr)
        else:
            table.save(source, path)
            print(f"served for {arguments.serve_for:.0f} s, {iterations:,} iterations: {source.provenance}")
            if source.serving is not None:
                print(f"a server adds {source.serving.words()}")
    for line in headline(source, built.kv_tokens):
        print(line)
    print(f"written to {path}\n")
    _print_table(source)
    return 0


def headline(source: TableSource, most: int) -> list[str]:
    """Return what the table comes to: prefill rates of prompts, and the next chunk of a document by its depth.

    most: tokens that the KV cache holds; depths beyond it are left out.
    """
    from headway.perf.latency.base import MAX_CHUNK, BatchLoad, PrefillCache, solve_tokens
    from headway.perf.latency.fitted import prefill_band
    from headway.perf.latency.table import TableLatency
    from headway.policy.iteration.budget import reference_aim_s
    from headway.policy.iteration.config import SchedulerConfig

    latency, config = TableLatency(source), SchedulerConfig()
    aim_s = reference_aim_s(config, latency)
    alone = PrefillCache(latency, aim_s, max(config.min_chunk, 16))
    prompts, depths = ([n for n in some if n < most] for some in (HEADLINE_PROMPTS, HEADLINE_DEPTHS))
    bands = ((prompt, prefill_band(latency, prompt)) for prompt in prompts)
    rates = [
        f"{n / alone.total_s(n):,.0f} tokens/s for a prompt of {n:,} ({band.words() if band else 'no error bar'})"
        for n, band in bands
    ]
    sizes = (solve_tokens(latency, BatchLoad(), depth, MAX_CHUNK, aim_s)[0] for depth in depths)
    chunks = [f"{max(config.min_chunk, size):,} after {depth:,}" for size, depth in zip(sizes, depths, strict=True)]
    return [
        f"prefill, alone:  {'; '.join(rates) or 'no prompt so long fits'}",
        f"next chunk in iterations of {aim_s * 1e3:.0f} ms, in tokens:  {'; '.join(chunks)}",
    ]


def _print_table(source: TableSource) -> None:
    """Print what was measured."""
    from headway.sim.report.tables import duration

    print("rows          time  (matrix products and all else that goes by rows)")
    for rows, seconds in source.tokens[1:]:
        print(f"{rows:>6}  {duration(seconds):>8}")
    print("chunk  attention of its own  per 1,000 tokens of history")
    for chunk, own, per_past in source.chunks[1:]:
        print(f"{chunk:>6} {duration(own):>20}  {per_past * 1e6:>16.3f} ms")
    fixed, per_request, per_token = source.decode
    print(f"decodes: {fixed * 1e3:.3f} ms + {per_request * 1e6:.1f} us a request + {per_token * 1e9:.2f} ns a KV token")
    if source.exchange is not None:
        every, row = source.exchange
        print(f"between KV groups: {every * 1e3:.3f} ms an iteration + {row * 1e6:.2f} us a row and guest group")
    print(f"histories up to {source.validated_past:,} tokens were measured; the line goes on beyond, unvalidated")
