"""What must hold of a machine between any two callbacks. For tests."""

from __future__ import annotations

from headway.control.controller import ClusterController
from headway.control.entries import SchedulerEntry, SpanEntry
from headway.core.errors import InvariantError


def check(controller: ClusterController) -> None:
    """Raise InvariantError unless queues, counts and transfers are those of the requests that have not ended, each of
    them runs once at most, and nothing is left on instances that are gone."""
    controller.queues.check()
    _check_lanes(controller)
    _check_journeys(controller)
    _check_counts(controller)
    state = controller.state
    for i in state.gone:
        if not controller.queues.empty(i) or state.residents[i]:
            raise InvariantError(f"something is left on instance {i}, which is gone")
        for piece in state.transfers.under_way():
            if i in (piece.source, piece.target):
                raise InvariantError(f"a piece of {piece.request} is under way at instance {i}, which is gone")


def _check_lanes(controller: ClusterController) -> None:
    """Whoever waits or runs belongs to a request that has not ended."""
    queues = controller.queues
    present = [entry for queue in queues.waiting for entry in queue] + [
        entry for entry in queues.running if entry is not None
    ]
    for entry in present:
        if isinstance(entry, SpanEntry):
            members = [member.controlled for member in (entry, *entry.batched_with)]
            alive = any(not controlled.ended for controlled in members)
        else:
            alive = not isinstance(entry, SchedulerEntry) or entry.controlled.scheduler_entry is entry
        if not alive:
            raise InvariantError(f"{entry.owner} has ended, and a {entry.kind} of it is in the queues")


def _check_journeys(controller: ClusterController) -> None:
    for name, controlled in controller.requests.items():
        if controlled.ended or controlled.request.id != name:
            raise InvariantError(f"{name} has ended and is still known")
        if sum(entry.state == "running" for entry in controlled.entries) > 1:
            raise InvariantError(f"{name} runs on two spans at once")
        for entry in controlled.entries:
            lead = entry.batch_leader or entry
            if entry.state == "running" and any(controller.queues.running[i] is not lead for i in entry.group):
                raise InvariantError(f"{name} runs on instances that do not know of it")
            if entry.state == "waiting" and any(lead not in controller.queues.waiting[i] for i in entry.group):
                raise InvariantError(f"{name} waits where it is in no queue")
        if controlled.scheduler_entry is not None and controlled.resident:
            raise InvariantError(f"{name} is in a scheduler and on its way to one")


def _check_counts(controller: ClusterController) -> None:
    state = controller.state
    load, tokens = [0] * len(state.residents), [0.0] * len(state.residents)
    for controlled in controller.requests.values():
        if controlled.resident:
            for i in controlled.group:
                load[i] += 1
        if controlled.scheduler_entry is not None:
            for i in controlled.scheduler_entry.group:
                tokens[i] += controlled.scheduler_entry.tokens / len(controlled.scheduler_entry.group)
    for entry in _open_spans(controller):
        for i in entry.group:
            tokens[i] += (entry.span.end - entry.span.start) / len(entry.group)
    if load != state.residents:
        raise InvariantError(f"requests in schedulers are {load}, counted {state.residents}")
    for i, (true, counted) in enumerate(zip(tokens, state.tokens, strict=True)):
        if abs(true - counted) > 1e-3:
            raise InvariantError(f"{true} tokens wait on instance {i}, counted {counted}")


def _open_spans(controller: ClusterController) -> list[SpanEntry]:
    """Spans that are not done, of those in a batch with one whose request has ended too."""
    found = {id(e): e for j in controller.requests.values() for e in j.entries if e.state != "done"}
    for entry in list(found.values()):
        if entry.batch_leader is not None:
            found[id(entry.batch_leader)] = entry.batch_leader
    return list(found.values())
