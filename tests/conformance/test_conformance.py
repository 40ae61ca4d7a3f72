"""What any `InstanceBackend` does: native instances, servers behind HTTP and simulated ones alike.

What a backend cannot do it declares in `capabilities`; the controller refuses actions that need more.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.cluster_streams import ANSWER_TOKENS
from tests.helpers.cluster_worlds import Scripted, cluster
from tests.helpers.conformance import ServedSubject, SimulatedSubject, Subject, headway_command, vllm_command
from tests.helpers.conformance_policy import DECODE_PAUSED, HANDED_OVER, PAUSED
from tests.helpers.controller_chaos import QuietBackend
from tests.helpers.greedy_reference import prompt_of

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
        ("spans", [CommitSpans("r", (_span(50, 0),), 1 << 30)], "whole prompts"),
        ("kv_transfer", [EnqueueRequest("r", (0,)), TransferKv("r", 1)], "move no KV"),
        ("pause", [CommitSpans("r", (_span(100, 0),), 1 << 30)], "do not pause a prefill"),
        ("decode_pause", [EnqueueRequest("r", (0,), "decode")], "do not pause a decode"),
    ],
)
def test_an_action_beyond_what_is_declared_is_refused_before_it_reaches_an_instance(
    needs: Capability, actions: list[Action], why: str
) -> None:
    policy = Scripted(lambda event, view: actions if isinstance(event, RequestArrived) else [])
    for has in (HTTP_CAPABILITIES - {needs}, ALL_CAPABILITIES):
        policy.heard.clear()
        spec = cluster(2)
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
