"""What any `InstanceBackend` does: native instances, servers behind HTTP and simulated ones alike.

What a backend cannot do it declares in `capabilities`; the controller refuses actions that need more.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.conformance.conformance_policy import DECODE_PAUSED, HANDED_OVER, PAUSED
from tests.helpers.checkpoints import make_tiny
from tests.helpers.cluster_probe import cluster, instances, pid_of, write
from tests.helpers.cluster_streams import ANSWER_TOKENS, ClientStream
from tests.helpers.cluster_worlds import Scripted
from tests.helpers.cluster_worlds import cluster as spec_of
from tests.helpers.controller_chaos import QuietBackend
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import complete, leave_after_sending
from tests.helpers.polling import let_arrive, until

from headway.control.controller import ClusterController
from headway.core.request import Request, Span
from headway.policy.placement.contract import (
    ALL_CAPABILITIES,
    HTTP_CAPABILITIES,
    Action,
    ActionRefused,
    Capability,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    PreemptRequest,
    RequestArrived,
    TransferKv,
)
from headway.policy.placement.registry import make_placement
from headway.sim.cluster.simulation import ClusterSimulation
from headway.sim.cluster.state import SimRequest
from headway.sim.loop import EventKind
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest

Prompt = list[int]
VERBS = "tests.conformance.conformance_policy.Verbs"


class Subject(ABC):
    """Two instances under `conformance_policy.Verbs`: most requests go whole to one, as by `jsq`."""

    heard: Path
    """File of the events of requests that do not go whole to one instance."""
    capabilities: frozenset[Capability]
    context: int
    """Tokens that one instance can hold."""

    def events(self, kind: str) -> int:
        """How many events of a kind the policy has had, of requests that do not go whole to one instance."""
        return (
            sum(line.split()[0] == kind for line in self.heard.read_text().splitlines()) if self.heard.exists() else 0
        )

    @abstractmethod
    def answers(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        """Answer all at once."""

    @abstractmethod
    def expected(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        """The answers of one undisturbed instance."""

    @abstractmethod
    def answers_while_losing(self, number: int, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        """Answer all at once, and lose an instance in the midst."""

    @abstractmethod
    def rejoin(self, number: int) -> None:
        """Wait until a lost instance serves again."""

    @abstractmethod
    def cancel(self, prompt: Prompt, count: int) -> None:
        """Ask, and leave before the end."""

    @abstractmethod
    def resident(self) -> int:
        """Requests that any instance has, after a moment."""

    @abstractmethod
    def refusal(self, prompt: Prompt, count: int) -> str:
        """Why a request that no instance can hold is refused."""

    @abstractmethod
    def close(self) -> None:
        """End everything."""


class ServedSubject(Subject):
    """Instances behind `headway cluster`: native ones, or servers that it starts."""

    context = 4096

    def __init__(self, folder: Path, model: Path, pools: object, *, native: bool) -> None:
        self.capabilities = ALL_CAPABILITIES if native else HTTP_CAPABILITIES
        self.heard = folder / "heard"
        path = write(
            folder, model, VERBS, {"heard": str(self.heard)}, pools, **({} if native else {"kv_cache_memory": None})
        )
        if not native:
            _without_engine_settings(Path(path))
        self._reference = GreedyReference(model)
        self._server = cluster(path)
        # vLLM takes minutes to start on a busy machine.
        self._server._ready_s = 600.0
        self._server.__enter__()
        self.url = self._server.url

    def answers(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        def ask(prompt: Prompt) -> list[int]:
            tokens: list[int] = complete(self.url, prompt, count, ignore_eos=True)["choices"][0]["token_ids"]
            return tokens

        # An error of any request is raised here.
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))

    def expected(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        return [self._reference.tokens(prompt, count) for prompt in prompts]

    def answers_while_losing(self, number: int, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        assert count == ANSWER_TOKENS, "what clients in threads ask for"
        asked = [ClientStream(self.url, prompt) for prompt in prompts]
        until(lambda: sum(bool(each.told) for each in asked) > len(asked) // 2, 60, "no answers begin")
        os.kill(pid_of(self.url, number), signal.SIGKILL)
        return [each.answer() for each in asked]

    def rejoin(self, number: int) -> None:
        until(lambda: all(each["state"] == "ready" for each in instances(self.url)), 600, "it does not come back")

    def cancel(self, prompt: Prompt, count: int) -> None:
        leave_after_sending(self.url, prompt, count)

    def resident(self) -> int:
        def now() -> int:
            return sum(each["placed"] + each["running"] for each in instances(self.url))

        def none_twice() -> bool:
            # What an instance runs is known from its reports: a look may be at one from before the request.
            before = now()
            let_arrive()
            return before == now() == 0

        until(none_twice, 60, "requests stay")
        return 0

    def refusal(self, prompt: Prompt, count: int) -> str:
        with pytest.raises(httpx.HTTPStatusError) as refused:
            complete(self.url, prompt, count)
        assert refused.value.response.status_code == 400
        return str(refused.value.response.json()["error"]["message"])

    def close(self) -> None:
        self._server.stop()


def _without_engine_settings(path: Path) -> None:
    """Take out what only native instances are told in a cluster file."""
    import json

    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"serve": {}}))


def headway_command() -> str:
    """What starts `headway serve` as one server of a pool."""
    return (
        f"{sys.executable} -m headway.cli.main serve {{model}} --port {{port}} --threads 1 --kv-cache-memory 32M "
        "--latency-profile quick"
    )


def vllm_command(python: Path) -> str:
    """What starts vLLM with Headway's scheduler on CPU as one server of a pool."""
    return (
        "env -u OMP_NUM_THREADS VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND={index} VLLM_NO_USAGE_STATS=1 "
        f"{python} -m vllm.entrypoints.openai.api_server --model {{model}} --host 127.0.0.1 --port {{port}} "
        "--dtype float32 --max-model-len 4096 --enforce-eager --scheduler-cls headway.vllm.Scheduler"
    )


class _Simulation(ClusterSimulation):
    """Calls what the script has scheduled."""

    def on_event(self, kind: EventKind, what: object) -> None:
        if callable(what):
            what()
            self.controller.deliver_events()
        else:
            super().on_event(kind, what)


class SimulatedSubject(Subject):
    """Simulated instances under the real controller. Tokens are counted: an answer's are 0, 1, …"""

    capabilities = ALL_CAPABILITIES
    context = 64_000

    def __init__(self, folder: Path) -> None:
        self.heard = folder / "heard"
        self._lost: set[int] = set()
        self._spec = spec_of(2)
        self._left = 0

    def _run(self, prompts: Sequence[Prompt], count: int, lose: int | None = None, leave: bool = False) -> _Simulation:
        workload = [TraceRequest(0.0, len(prompt), count) for prompt in prompts]
        policy = make_placement(VERBS, self._spec.policy_context, {"heard": str(self.heard)})
        world = _Simulation(self._spec, policy, workload, RunSpec())
        for number in self._lost:
            world.controller.lost(number, 0.0)
        if lose is not None:
            world.schedule(0.05, EventKind.TIMER, lambda: self._lose(world, lose))
        if leave:
            world.schedule(0.05, EventKind.TIMER, lambda: self._leave(world))
        world.run_events()
        self._left = len(world.controller.requests) + sum(world.controller.state.residents)
        return world

    def _lose(self, world: _Simulation, number: int) -> None:
        self._lost.add(number)
        known = {name: each.backend_state for name, each in world.controller.requests.items()}
        for request in world.controller.lost(number, world.now):
            # As a driver does: another attempt with the tokens so far as a part of its prompt.
            before: SimRequest = known[request.id]
            if before.track is not None:
                before.take_tokens(before.track)
            said = len(before.times)
            again = Request(
                id=f"{request.id}#",
                arrival_s=world.now,
                prompt_tokens=request.prompt_tokens + said,
                max_output_tokens=request.max_output_tokens - said,
            )
            rest = TraceRequest(world.now, again.prompt_tokens, again.max_output_tokens)
            after = SimRequest(again, rest)
            world.requests.append(after)
            before.ended_s = world.now
            world.controller.arrive(again, world.now, after)

    def _leave(self, world: _Simulation) -> None:
        for controlled in list(world.controller.requests.values()):
            world.controller.drop(controlled, "its client left", world.now)

    def answers(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        return self._told(self._run(prompts, count), len(prompts))

    def _told(self, world: _Simulation, count: int) -> list[list[int]]:
        told = {request.request.id: len(request.times) for request in world.requests}
        return [list(range(sum(n for name, n in told.items() if name.rstrip("#") == f"r{i}"))) for i in range(count)]

    def expected(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        return [list(range(count)) for _ in prompts]

    def answers_while_losing(self, number: int, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        world = self._run(prompts, count, lose=number)
        assert any(request.request.id.endswith("#") for request in world.requests), "nothing was on it"
        return self._told(world, len(prompts))

    def rejoin(self, number: int) -> None:
        self._lost.discard(number)

    def cancel(self, prompt: Prompt, count: int) -> None:
        self._run([prompt], count, leave=True)

    def resident(self) -> int:
        return self._left

    def refusal(self, prompt: Prompt, count: int) -> str:
        (request,) = self._run([prompt], count).requests
        assert request.rejected
        return request.error or "rejected"

    def close(self) -> None:
        """Nothing is left."""


ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((700, 20, 3, 1100, 60, 333))]
LONG = pytest.mark.long


@pytest.fixture(
    scope="module",
    params=["simulated", *(pytest.param(kind, marks=LONG) for kind in ("native", "serve", "vllm"))],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A cluster of two instances of one kind."""
    kind = request.param
    made: Subject
    if kind == "simulated":
        made = SimulatedSubject(tmp_path_factory.mktemp(kind))
    else:
        if kind == "vllm" and not VLLM.exists():
            pytest.skip("there is no .venv-vllm here: make vllm")
        folder = tmp_path_factory.mktemp(kind)
        # Heads that vLLM's CPU kernels have.
        model = make_tiny("llama", folder / "model", max_position_embeddings=4096, head_dim=32)
        # vLLM does not start without a tokenizer.
        runpy.run_path(str(ROOT / "scripts" / "make_checkpoint.py"))["write_tokenizer"](128, model)
        command = vllm_command(VLLM) if kind == "vllm" else headway_command()
        pools = [{"count": 2}] if kind == "native" else [{"backend": "vllm", "count": 2, "command": command}]
        made = ServedSubject(folder, model, pools, native=kind == "native")
    yield made
    made.close()


def test_whole_requests_are_prefilled_and_decoded_as_by_one_instance(subject: Subject) -> None:
    assert subject.answers(PROMPTS, 20) == subject.expected(PROMPTS, 20)
    assert subject.resident() == 0


def test_a_request_whose_client_leaves_ends(subject: Subject) -> None:
    subject.cancel(prompt_of(9, 2500), 1200)
    assert subject.resident() == 0


def test_a_request_that_no_instance_can_hold_is_refused_and_others_are_served(subject: Subject) -> None:
    assert subject.refusal(prompt_of(1, subject.context + 10), 5)
    assert subject.answers(PROMPTS[:2], 5) == subject.expected(PROMPTS[:2], 5)


def test_a_lost_instance_changes_no_answer_and_serves_again(subject: Subject) -> None:
    expected = subject.expected(PROMPTS, ANSWER_TOKENS)
    assert subject.answers_while_losing(0, PROMPTS, ANSWER_TOKENS) == expected
    subject.rejoin(0)
    assert subject.answers(PROMPTS, 20) == [answer[:20] for answer in expected]
    assert subject.resident() == 0


@pytest.mark.parametrize(
    ("needs", "tokens", "event"),
    [
        ("kv_transfer", HANDED_OVER, "KvReady"),
        ("pause", PAUSED, "SpanPaused"),
        ("decode_pause", DECODE_PAUSED, "SpanPaused"),
    ],
)
def test_a_request_that_is_handed_over_or_paused_is_answered_as_by_one_instance(
    subject: Subject, needs: Capability, tokens: int, event: str
) -> None:
    if needs not in subject.capabilities:
        pytest.skip(f"it declares no {needs}")
    subject.rejoin(0)
    for seed in range(5):
        prompts, before = [prompt_of(20 + seed, tokens), *PROMPTS[1:3]], subject.events(event)
        # Where processes wait for a core, 200 tokens may all be read after the last one, when a pause is too late.
        count = min(200 << seed, 1600)
        assert subject.answers(prompts, count) == subject.expected(prompts, count)
        if subject.events(event) > before:
            break
    else:
        pytest.fail(f"no {event} in five requests:\n{subject.heard.read_text()}")
    assert subject.resident() == 0


class _Silent(QuietBackend):
    def __init__(self, has: frozenset[Capability]) -> None:
        self.capabilities = has


ASKED = Request(id="r", arrival_s=0.0, prompt_tokens=100, max_output_tokens=3)


def _span(end: int, *group: int) -> Span:
    return Span(request=ASKED, start=0, end=end, group=group)


@pytest.mark.parametrize(
    ("needs", "actions", "why"),
    [
        ("groups", [CommitSpans("r", (_span(100, 0, 1),), 1 << 30)], "do not compute together"),
        ("groups", [EnqueueRequest("r", (0, 1))], "do not compute together"),
        ("spans", [CommitSpans("r", (_span(100, 0),), 1 << 30)], "whole requests"),
        ("spans", [EnqueueRequest("r", (0,), "prefill")], "whole requests"),
        ("kv_transfer", [EnqueueRequest("r", (0,)), TransferKv("r", 1)], "move no KV"),
        ("pause", [CommitSpans("r", (_span(100, 0),), 1 << 30)], "do not pause a prefill"),
        ("decode_pause", [EnqueueRequest("r", (0,), "decode")], "do not pause a decode"),
    ],
)
def test_an_action_beyond_what_is_declared_is_refused_before_it_reaches_an_instance(
    needs: Capability, actions: list[Action], why: str
) -> None:
    policy = Scripted(lambda event, view: actions if isinstance(event, RequestArrived) else [])
    for has in (ALL_CAPABILITIES - {needs}, ALL_CAPABILITIES):
        policy.heard.clear()
        spec = spec_of(2)
        state = ClusterState(spec.instances, spec.links)
        controller = ClusterController(state, _Silent(has), policy, layers=2)
        controller.arrive(ASKED, 0.0)
        controller.settle(0.0)
        if "pause" in needs:
            controller.do(PreemptRequest("r"))
            controller.settle(0.0)
        refused = [event.why for _, event in policy.heard if isinstance(event, ActionRefused)]
        if has == ALL_CAPABILITIES:
            assert refused == []
        else:
            (said,) = refused
            assert why in said
