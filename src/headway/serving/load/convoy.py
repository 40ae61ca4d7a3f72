"""The convoy experiment: latency of short prompts that arrive while one long prompt is prefilled; one server for each
policy.

One run measures one server in one configuration:
1. warm-up: a few shorts in sequence (the last ones give the latency of a short alone), then one long prompt, because
   the first one is slowed by first use of memory,
2. a long prompt without shorts: `alone_s`,
3. the convoy: another long prompt of the same length at t = 0, and a short one per interval until the long one's first
   token. Percentiles are over the shorts sent in that time, however late their answers.
Prompts are distinct random token ids, so that no prefix cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from headway.core.errors import ConfigError, HeadwayError
from headway.core.files import check_outputs, write_output
from headway.core.machine import free_port
from headway.core.parse import duration
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint, first_model
from headway.serving.load.prompts import SAFE_VOCAB, PromptPool, machine, versions, vocab_size_of, whole
from headway.sim.metrics import RequestRecord, percentile_name, percentiles, quantile, tbt_s, ttft_s
from headway.sim.workload.generate import parse_tokens


class ConvoyError(HeadwayError):
    """The long prompt or a warm-up request failed; the message has the request and its error."""


@dataclass(frozen=True, kw_only=True)
class ConvoyPlan:
    """Requests of one run. Lengths in tokens."""

    long_tokens: int
    long_output: int = 1
    short_tokens: int = 200
    short_output: int = 16
    short_interval_s: float = 1.0
    warmup: int = 5
    """Shorts sent before the measurement."""
    repeat: int = 1
    """Convoys; their shorts are pooled."""
    alone: bool = True
    """Whether the long prompt is measured without shorts as well."""
    max_s: float = 600.0
    """Seconds after which no more shorts are sent, so that a run on an overloaded server ends."""
    seed: int = 0
    """Decides all prompts."""


@dataclass(frozen=True)
class ConvoyResult:
    """Records of one convoy."""

    long: RequestRecord
    shorts: tuple[RequestRecord, ...]
    """Those sent before the long prompt's first token, in order."""
    cut_short: bool = False
    """Whether `ConvoyPlan.max_s` ended the shorts before the long prompt's first token."""
    alone: RequestRecord | None = None
    """The long prompt without shorts, where it was measured."""


@dataclass(frozen=True, kw_only=True)
class ConvoyRun:
    """All measurements with one server."""

    convoys: tuple[ConvoyResult, ...]
    """One per repeat."""
    shorts_alone: tuple[RequestRecord, ...] = ()
    """The warm-up's shorts."""

    @property
    def shorts(self) -> list[RequestRecord]:
        """Shorts of all repeats, pooled."""
        return [short for convoy in self.convoys for short in convoy.shorts]

    @property
    def long_s(self) -> float | None:
        """Median over repeats of the long prompt's TTFT among shorts."""
        return quantile([s for convoy in self.convoys if (s := ttft_s(convoy.long)) is not None], 50)

    @property
    def alone_s(self) -> float | None:
        """Median over repeats of the long prompt's TTFT alone."""
        alone = (convoy.alone for convoy in self.convoys if convoy.alone is not None)
        return quantile([s for record in alone if (s := ttft_s(record)) is not None], 50)

    @property
    def short_alone_s(self) -> float | None:
        """Median TTFT of a short alone, without the first one, which includes the server's one-time work."""
        return quantile(
            [s for record in self.shorts_alone[1:] if (s := ttft_s(record)) is not None],
            50,
        )


Say = Callable[[str], None]


@dataclass
class PromptSource:
    """Makers of a convoy's requests: random ids for `headway bench`, texts for the demo."""

    long: Callable[[], LoadRequest]
    short: Callable[[], LoadRequest]


def random_prompts(plan: ConvoyPlan, vocab_size: int) -> PromptSource:
    """Make a source of prompts of random ids, drawn with the plan's seed."""
    pool = PromptPool(np.random.default_rng(plan.seed), vocab_size, max(plan.long_tokens, plan.short_tokens))

    def job(klass: str, tokens: int, output: int) -> LoadRequest:
        return LoadRequest(
            id="",
            klass=klass,
            prompt=pool.json(tokens),
            prompt_tokens=tokens,
            output_tokens=output,
        )

    return PromptSource(
        long=lambda: job("long", plan.long_tokens, plan.long_output),
        short=lambda: job("short", plan.short_tokens, plan.short_output),
    )


@dataclass
class ConvoyRunner:
    """Runner of a plan against one endpoint. say: called with lines of progress."""

    endpoint: TargetEndpoint
    plan: ConvoyPlan
    prompts: PromptSource
    say: Say = field(default=lambda line: None)

    async def run(self) -> ConvoyRun:
        """Run the experiment. A failed short becomes a record; raises ConvoyError for any other failed request."""
        async with LoadClient(self.endpoint) as client:
            shorts_alone = await self.warm_up(client)
            convoys = [await self.round(client, number) for number in range(self.plan.repeat)]
        return ConvoyRun(convoys=tuple(convoys), shorts_alone=tuple(shorts_alone))

    async def warm_up(self, client: LoadClient) -> list[RequestRecord]:
        """Send the plan's shorts one after the other, then a long prompt where it will be measured alone."""
        shorts_alone = [await self._one(client, self.prompts.short(), f"warm-{i}") for i in range(self.plan.warmup)]
        self.say(f"warm-up: {self.plan.warmup} shorts")
        if self.plan.warmup and self.plan.alone:
            cold = await self._one(client, self.prompts.long(), "warm-long")
            self.say(f"warm-up: a long prompt, {ttft_s(cold) or 0.0:.2f} s")
        return shorts_alone

    async def round(self, client: LoadClient, number: int) -> ConvoyResult:
        """Measure the long prompt alone, where the plan says so, and a convoy."""
        alone = None
        if self.plan.alone:
            alone = await self._one(client, self.prompts.long(), f"long-alone-{number}")
            self.say(f"long prompt alone: {ttft_s(alone) or 0.0:.2f} s")
        convoy = await self._convoy(client, number)
        self.say(f"long prompt among {len(convoy.shorts)} shorts: {ttft_s(convoy.long) or 0.0:.2f} s")
        return replace(convoy, alone=alone)

    async def _one(self, client: LoadClient, job: LoadRequest, name: str) -> RequestRecord:
        client.restart_clock()
        return _checked(await client.send(_named(job, name, 0.0)))

    async def _convoy(self, client: LoadClient, number: int) -> ConvoyResult:
        # Set at the long prompt's first token, or at its end when it fails before.
        read = asyncio.Event()
        client.restart_clock()
        long = asyncio.create_task(
            client.send(_named(self.prompts.long(), f"long-{number}", 0.0), lambda _: read.set())
        )
        long.add_done_callback(lambda _: read.set())
        shorts: list[asyncio.Task[RequestRecord]] = []
        try:
            while True:
                due_s = self.plan.short_interval_s * (len(shorts) + 1)
                if due_s > self.plan.max_s:
                    self.say(f"no more shorts after {self.plan.max_s:g} s; waiting for the long prompt")
                    break
                # Made before the wait, so that building the prompt does not delay its sending.
                job = _named(self.prompts.short(), f"short-{number}-{len(shorts)}", due_s)
                if await _set_before(read, due_s - client.now()):
                    break
                shorts.append(asyncio.create_task(client.send(job)))
            # Before the long prompt is awaited, which would set the event.
            cut_short = not read.is_set()
            return ConvoyResult(_checked(await long), tuple([await task for task in shorts]), cut_short)
        finally:
            # On an error or Ctrl-C no request outlives the experiment; finished tasks are not affected.
            for task in (long, *shorts):
                task.cancel()


async def alternate(runners: Sequence[ConvoyRunner], seconds: float) -> list[ConvoyRun]:
    """Run convoys against several endpoints in turn, so that what else the machine does meets all alike.

    Each gets as many: at least one, and no further round that would end later than `seconds` after the start."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(LoadClient(runner.endpoint)) for runner in runners]
        began_s = time.monotonic()
        warm = [await runner.warm_up(client) for runner, client in zip(runners, clients, strict=True)]
        rounds: list[list[ConvoyResult]] = [[] for _ in runners]
        while True:
            round_s = time.monotonic()
            for runner, client, done in zip(runners, clients, rounds, strict=True):
                done.append(await runner.round(client, len(done)))
            now_s = time.monotonic()
            if now_s - began_s + (now_s - round_s) > seconds:
                break
    return [
        ConvoyRun(convoys=tuple(done), shorts_alone=tuple(shorts)) for shorts, done in zip(warm, rounds, strict=True)
    ]


async def _set_before(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most `seconds`; return whether it is set."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


def _named(job: LoadRequest, name: str, due_s: float) -> LoadRequest:
    return replace(job, id=name, due_s=due_s)


def _checked(record: RequestRecord) -> RequestRecord:
    if not record.ok:
        raise ConvoyError(f"request {record.id} ({record.prompt_tokens} tokens) failed: {record.error}")
    return record


SERVE: tuple[str, ...] = (sys.executable, "-P", "-m", "headway.cli.main", "serve")
KEPT_STDERR_CHARS = 4000
"""Bytes of the server's output that an error quotes."""


class ServerError(HeadwayError):
    """The server did not start; the message ends with the end of its output."""


class ServerProcess:
    """Context manager around `command … --port P` on loopback: ready on entry, ended on exit in every case.

    The child leads its own process group, so Ctrl-C does not reach it; on exit the whole group gets SIGTERM and,
    `grace_s` seconds later, SIGKILL. Its output goes to a temporary file, whose end is quoted in errors. environment:
    the child's, by default this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = SERVE,
        ready_s: float = 180.0,
        grace_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.command = [*command, *arguments, "--port", str(self._port)]
        self._ready_s, self._grace_s = ready_s, grace_s
        self._environment = environment
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — lives as long as this object
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: OSError | None = None
        self.start_s: float | None = None

    def __enter__(self) -> Self:
        begun = time.monotonic()
        # In a thread: a signal's exception, which is raised in the main one, cannot hide a process that has started.
        starter = threading.Thread(target=self._start)
        starter.start()
        try:
            starter.join()
            while not _answers(f"{self.url}/ready", f"{self.url}/health"):
                self._check_alive()
                if time.monotonic() - begun > self._ready_s:
                    raise ServerError(f"the server was not ready after {self._ready_s:g} s; {self.last_words()}")
                time.sleep(0.05)
        # Ctrl-C while waiting included: __exit__ is not called when __enter__ raises.
        except BaseException:
            starter.join()
            self.stop()
            raise
        self.start_s = time.monotonic() - begun
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is not None and isinstance(value, Exception) and self._process and self._process.poll() is not None:
            # The client's error is often only a closed connection; the server's output has the cause.
            value.add_note(f"the server had ended with status {self._process.returncode}; {self.last_words()}")
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None
        return self._process.pid

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        except OSError as error:
            self._failed = error

    def _check_alive(self) -> None:
        if self._failed is not None:
            raise self._failed
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerError(
                f"the server ended with status {self._process.returncode} before it was ready "
                f"({' '.join(self.command)}); {self.last_words()}"
            )

    def last_words(self) -> str:
        """Return the end of the server's output, as part of a sentence."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - KEPT_STDERR_CHARS))
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"it wrote:\n{text}" if text else "it wrote nothing"

    def kill(self) -> None:
        """Kill the server and its child processes at once, as a crash would."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the server and its child processes. Idempotent."""
        process, self._process = self._process, None
        try:
            if process is not None:
                self._end(process)
        finally:
            self._log.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for number, patience in (
            (signal.SIGTERM, self._grace_s),
            (signal.SIGKILL, 10.0),
        ):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
            # The leader has ended, its children may not have: SIGKILL follows for the rest of the group.
        process.poll()


def _answers(*urls: str) -> bool:
    """Return whether the first URL that exists answers 200 (`/ready`, or `/health` on a server without it)."""
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except urllib.error.HTTPError as problem:
            # 404: this server lacks the path, try the next one. Any other status: not ready yet.
            if problem.code != 404:
                return False
        except OSError:
            return False
    return False


# Notation of a scheduling policy and its chunking on a command line: `ladder`, `fcfs`, `fcfs+static:512`.

DEFAULT_CHUNKING = {
    "ladder": "adaptive",
    "fcfs": "whole",
    "lars": "adaptive",
    "edf": "adaptive",
    "lrs": "adaptive",
    "srpt": "adaptive",
}
"""Chunking of a policy that is named without one: whole prompts for the baseline, a time budget for the others."""


@dataclass(frozen=True)
class PolicySpec:
    """A scheduling policy and a chunking, as named by `headway serve`."""

    policy: str
    chunking: str

    @property
    def label(self) -> str:
        """Label for tables and pictures."""
        return (
            f"{self.policy}, {self.chunking} prompts"
            if self.chunking == "whole"
            else f"{self.policy}, {self.chunking} chunks"
        )

    def server_arguments(self) -> list[str]:
        """Return the flags of `headway serve` that select the policy and chunking."""
        return ["--scheduling-policy", self.policy, "--chunking", self.chunking]


def parse_policies(text: str) -> list[PolicySpec]:
    """Parse a list such as `lars,fcfs+static:512`, in order. Raises ConfigError that lists what is allowed."""
    return [_parse(item.strip()) for item in text.split(",") if item.strip()]


def _parse(item: str) -> PolicySpec:
    policy, plus, chunking = item.partition("+")
    if policy not in DEFAULT_CHUNKING:
        raise ConfigError(f"unknown policy {policy!r} in --policies; allowed are {', '.join(DEFAULT_CHUNKING)}")
    # "lars+" is an error below, not the default: a trailing plus is a mistake.
    chunking = chunking if plus else DEFAULT_CHUNKING[policy]
    name, _, size = chunking.partition(":")
    if not (chunking in ("adaptive", "whole") or (name == "static" and size.isdigit() and int(size) > 0)):
        raise ConfigError(f"unknown chunking {chunking!r} in --policies; allowed are adaptive, whole, static:N")
    return PolicySpec(policy, chunking)


SCHEMA = "headway.convoy/1"
MEASURES = {
    "ttft_p50": ("short", "ttft_s", "p50"),
    "ttft_p99": ("short", "ttft_s", "p99"),
    "tbt_p50": ("short", "tbt_s", "p50"),
    "tbt_p99": ("short", "tbt_s", "p99"),
    "long_ttft": ("long", "ttft_s", "p50"),
}
"""What is compared of two runs, and its place in a run's JSON."""


def run_json(spec: PolicySpec, run: ConvoyRun) -> dict[str, Any]:
    """Return one run. Times in seconds; `series` has one row per short: due time, TTFT, largest TBT, error."""
    # Failed shorts have no latency: they are counted in `failed` and left out of percentiles.
    ttfts = [ttft_s(short) for short in run.shorts if short.ok]
    gaps = [gap for short in run.shorts if short.ok for gap in tbt_s(short)]
    long_s, alone_s = run.long_s, run.alone_s
    return {
        "policy": spec.policy,
        "chunking": spec.chunking,
        "short": {
            "ttft_s": percentiles(ttfts),
            "tbt_s": percentiles(gaps),
            "n": len(run.shorts),
            "failed": sum(not short.ok for short in run.shorts),
            "alone_ttft_s": run.short_alone_s,
        },
        "long": {
            "ttft_s": {
                percentile_name(p): quantile([s for c in run.convoys if (s := ttft_s(c.long)) is not None], p)
                for p in (50,)
            },
            "alone_s": alone_s,
            "slowdown": long_s / alone_s if long_s is not None and alone_s else None,
        },
        "convoys": [
            {
                "long_ttft_s": ttft_s(convoy.long),
                "cut_short": convoy.cut_short,
                "series": [
                    {
                        "t_s": short.arrival_s,
                        "ttft_s": ttft_s(short),
                        "max_tbt_s": max(tbt_s(short), default=None),
                        "error": short.error,
                    }
                    for short in convoy.shorts
                ],
            }
            for convoy in run.convoys
        ],
    }


def convoy_json(
    model: str, plan: ConvoyPlan, runs: Sequence[tuple[PolicySpec, ConvoyRun]], compared: bool = False
) -> dict[str, Any]:
    """Return the file's contents, with ratios where runs are `compared`."""
    found = [run_json(spec, run) for spec, run in runs]
    return {
        "schema": SCHEMA,
        "model": model,
        "plan": asdict(plan),
        "machine": machine(),
        "versions": versions(),
        "runs": found,
        "ratios": ratios(found) if compared else [],
    }


def ratios(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each further run's times over the first run's, by the names of `MEASURES`; None without a value."""
    first = runs[0]
    return [
        {
            "policy": run["policy"],
            **{name: _ratio(value_of(run, path), value_of(first, path)) for name, path in MEASURES.items()},
        }
        for run in runs[1:]
    ]


def value_of(run: Any, path: Sequence[str]) -> float | None:
    """Return a number of a run's JSON."""
    for part in path:
        run = run[part]
    return None if run is None else float(run)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


@dataclass(frozen=True, kw_only=True)
class ServerUnderTest:
    """The server to start, without its policy."""

    model: str
    """Checkpoint folder."""
    max_model_len: int
    arguments: tuple[str, ...] = ()
    """Further arguments of the command."""
    command: tuple[str, ...] = SERVE
    api_key: str | None = None
    timeout_s: float | None = 3600.0
    """Limit of one request."""


def serve_and_measure(served: ServerUnderTest, spec: PolicySpec, plan: ConvoyPlan, prompts: PromptSource) -> ConvoyRun:
    """Start a server with a policy, run the plan against it, and end it. Errors quote the end of its output."""
    from headway.sim.report.tables import say

    say(f"[bold]{spec.label}[/bold]: starting a server")
    arguments = [
        served.model,
        "--max-model-len",
        str(served.max_model_len),
        *spec.server_arguments(),
        *served.arguments,
    ]
    with ServerProcess(arguments, command=served.command) as server:
        say(f"  ready after {server.start_s:.1f} s")
        entry = first_model(server.url, served.api_key)
        check_lengths(plan, entry.get("max_model_len"), server.url)
        endpoint = TargetEndpoint(
            base_url=server.url,
            model=str(entry["id"]),
            api_key=served.api_key,
            timeout_s=served.timeout_s,
        )
        return measure([endpoint], plan, prompts, [""], 0.0)[0]


def check_lengths(plan: ConvoyPlan, limit: object, url: str) -> None:
    """Raise ConfigError where the server at `url` allows fewer tokens (`limit`, if it says so) than a request needs."""
    lengths = (("long", plan.long_tokens, plan.long_output), ("short", plan.short_tokens, plan.short_output))
    for name, prompt, output in lengths:
        if isinstance(limit, int) and prompt + output > limit:
            raise ConfigError(
                f"--{name}-tokens {prompt} and --{name}-output {output} are {prompt + output} tokens, and {url} allows "
                f"{limit} a request: give at most --{name}-tokens {max(0, limit - output)}"
            )


def measure(
    endpoints: Sequence[TargetEndpoint], plan: ConvoyPlan, prompts: PromptSource, labels: Sequence[str], seconds: float
) -> list[ConvoyRun]:
    """Run the plan against an endpoint, or against several in turn for `seconds`, with progress on the terminal."""
    from headway.sim.report.tables import say

    def runner(endpoint: TargetEndpoint, label: str) -> ConvoyRunner:
        prefix = f"  {label}: " if len(endpoints) > 1 else "  "
        return ConvoyRunner(endpoint, plan, prompts, say=lambda line: say(prefix + line))

    runners = [runner(endpoint, label) for endpoint, label in zip(endpoints, labels, strict=True)]
    if len(runners) == 1:
        return [asyncio.run(runners[0].run())]
    return asyncio.run(alternate(runners, seconds))


def report(data: dict[str, Any], json_file: Path | None, page_file: Path | None = None, wide: bool = False) -> int:
    """Print the table of a convoy's JSON; write it and an HTML page where asked. Return 1 if a short failed, else 0."""
    from headway.sim.report.tables import convoy_sentence, convoy_table, ratio_table, say, show

    parts: list[Any] = [
        convoy_sentence(data),
        convoy_table(data, wide),
        *([ratio_table(data)] if data["ratios"] else []),
    ]
    for part in parts:
        show(part)
    for run in data["runs"]:
        errors = [row["error"] for convoy in run["convoys"] for row in convoy["series"] if row["error"]]
        if errors:
            say(f"{run['policy']}: {len(errors)} of {run['short']['n']} shorts failed, the first with: {errors[0]}")
    if json_file is not None:
        write_output(json_file, json.dumps(data, indent=1).encode() + b"\n")
        say(f"wrote {json_file}")
    if page_file is not None:
        from headway.sim.report.page import convoy_charts, write_page

        write_page(page_file, "headway bench convoy", parts, convoy_charts(data))
        say(f"wrote {page_file}")
    # A failed long prompt has raised ConvoyError before.
    return 1 if any(run["short"]["failed"] for run in data["runs"]) else 0


LONG_TOKENS = 32768
"""Length of the long prompt, unless it is given or the server allows less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `headway bench convoy`."""
    _add_servers(parser.add_argument_group("what to measure"))
    _add_load(parser.add_argument_group("the load"))
    out = parser.add_argument_group("output")
    out.add_argument("--wide", action="store_true", help="every percentile, wider than 80 columns")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    out.add_argument("--report", type=Path, metavar="FILE", help="write one HTML page: sentence, tables, charts")


def _add_servers(group: argparse._ArgumentGroup) -> None:
    """Add the options that select the servers."""
    add = group.add_argument
    add("--model", help="checkpoint folder to serve; with --url, the model name to ask for")
    add(
        "--url",
        action="append",
        help="measure the server that runs there instead of starting one per policy; several: in turn, with ratios",
    )
    help_text = "with several --url: measure for so long; no round begins that would end later (default %(default)s)"
    add("--seconds", type=duration, default=120.0, help=help_text)
    add("--policies", default="ladder,fcfs", help="comma-separated POLICY or POLICY+CHUNKING (default %(default)s)")
    add(
        "--max-model-len",
        type=parse_tokens,
        help="context of the started servers (default: what the long prompt needs)",
    )
    add("--server-args", default="", help="further arguments for `headway serve`, as one string")
    add("--server-command", help="start this instead of `headway serve`")
    add(
        "--label",
        action="append",
        help="with --url: the server's name in results, one for each (default as-served, or the URLs)",
    )
    add("--api-key", help="sent as a bearer token")


def _add_load(group: argparse._ArgumentGroup) -> None:
    """Add the options of the requests."""

    def add(flag: str, kind: Callable[[str], Any], default: float, text: str) -> None:
        group.add_argument(flag, type=kind, default=default, help=f"{text} (default %(default)s)")

    help_text = "length of the long prompt (default 32768; with --url at most what the server allows)"
    group.add_argument("--long-tokens", type=parse_tokens, help=help_text)
    add("--long-output", parse_tokens, 1, "tokens of the long prompt's answer")
    add("--short-tokens", parse_tokens, 200, "length of a short prompt")
    add("--short-output", parse_tokens, 16, "tokens of a short prompt's answer")
    add("--short-interval", duration, 1.0, "seconds between shorts")
    add("--warmup", int, 5, "short prompts sent before the measurement, then a long one")
    add("--repeat", int, 1, "convoys of each server, whose results are pooled; several --url: --seconds decides")
    add("--max-seconds", duration, 600.0, "seconds after which a convoy sends no more short prompts")
    help_text = "draw prompt ids below this (default: the checkpoint's, else 256)"
    group.add_argument("--vocab-size", type=whole(2), help=help_text)
    add("--seed", whole(0), 0, "decides every prompt")
    add("--timeout", duration, 3600.0, "seconds for one request")


def run(args: argparse.Namespace) -> int:
    """Run the experiment; return 0 when every request was answered, 1 when a short was not."""
    check_outputs(args.json, args.report)
    if args.url:
        return _compare(args)
    plan = _plan(args, args.long_tokens or LONG_TOKENS)
    specs = parse_policies(args.policies)
    if not args.model:
        raise ConfigError("name a checkpoint folder with --model, or a running server with --url")
    # The longest request decides the servers' context, and so their KV pool.
    need = max(plan.long_tokens + plan.long_output, plan.short_tokens + plan.short_output)
    check_lengths(plan, args.max_model_len, "--max-model-len")
    server = ServerUnderTest(
        model=args.model,
        max_model_len=args.max_model_len or need,
        arguments=tuple(shlex.split(args.server_args)),
        command=tuple(shlex.split(args.server_command)) if args.server_command else SERVE,
        api_key=args.api_key,
        timeout_s=args.timeout,
    )
    results = [(spec, serve_and_measure(server, spec, plan, _prompts(args, plan))) for spec in specs]
    return report(convoy_json(Path(args.model).name, plan, results), args.json, args.report, args.wide)


def _plan(args: argparse.Namespace, long_tokens: int, alone: bool = True) -> ConvoyPlan:
    if args.repeat < 1 or args.warmup < 0:
        raise ConfigError("--repeat must be at least 1 and --warmup at least 0")
    if not args.short_interval > 0:
        raise ConfigError(f"--short-interval is {args.short_interval}; it must be above 0 seconds")
    return ConvoyPlan(
        long_tokens=long_tokens,
        long_output=args.long_output,
        short_tokens=args.short_tokens,
        short_output=args.short_output,
        short_interval_s=args.short_interval,
        warmup=args.warmup,
        repeat=args.repeat,
        max_s=args.max_seconds,
        alone=alone,
        seed=args.seed,
    )


def _prompts(args: argparse.Namespace, plan: ConvoyPlan) -> PromptSource:
    """Make random prompts within the model's vocabulary."""
    return random_prompts(plan, args.vocab_size or vocab_size_of(args.model) or SAFE_VOCAB)


def _compare(args: argparse.Namespace) -> int:
    """Measure the servers at `--url`, several in turn."""
    labels = args.label or (["as-served"] if len(args.url) == 1 else args.url)
    if len(labels) != len(args.url):
        raise ConfigError(f"{len(args.url)} --url and {len(labels)} --label: give one label for each")
    endpoints, limits = zip(*(_endpoint(args, url) for url in args.url), strict=True)
    most = min(limit for limit in (*limits, LONG_TOKENS + args.long_output) if limit)
    plan = _plan(args, args.long_tokens or most - args.long_output, alone=len(endpoints) == 1)
    for url, limit in zip(args.url, limits, strict=True):
        check_lengths(plan, limit, url)
    runs = measure(endpoints, plan, _prompts(args, plan), labels, args.seconds)
    specs = [PolicySpec(label, "as-served" if len(labels) == 1 else "") for label in labels]
    data = convoy_json(Path(args.model or "").name, plan, list(zip(specs, runs, strict=True)), len(runs) > 1)
    return report(data, args.json, args.report, args.wide)


def _endpoint(args: argparse.Namespace, url: str) -> tuple[TargetEndpoint, int | None]:
    """Return a running server, and the tokens that it allows a request where it says so."""
    entry = first_model(url, args.api_key)
    # With --url, a folder in --model only tells the vocabulary; otherwise it is the name to send.
    named = args.model is not None and not Path(args.model).is_dir()
    model = args.model if named else str(entry["id"])
    limit = entry.get("max_model_len")
    endpoint = TargetEndpoint(base_url=url, model=model, api_key=args.api_key, timeout_s=args.timeout)
    return endpoint, limit if isinstance(limit, int) else None
