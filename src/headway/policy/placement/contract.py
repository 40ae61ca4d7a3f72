"""Interface of placement policies: the events that a policy is told, the snapshot of the cluster that it sees, the
actions that it returns, and the capabilities that instances must have for them.

A placement policy decides where a span or a request goes and which goes first; an instance's scheduler decides how many
tokens an iteration computes. A policy is a deterministic state machine: no clock, no randomness without a seed, nothing
of the simulator. The driver (`control.controller.ClusterController`, for the simulator and the live cluster alike)
calls `on_event` once for each event, in order of time, carries out the returned actions in order, and reports their
outcome as later events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import msgspec

from headway.core.errors import ConfigError
from headway.core.files import read_input
from headway.core.request import Phase, Request, Span
from headway.perf.hardware import NetworkLink

Capability = Literal["spans", "groups", "kv_transfer", "pause", "decode_pause", "prefix_copy"]
"""`spans`: compute a prompt, or a part of it, apart from its decode. `groups`: compute together with other instances.
`kv_transfer`: send KV to another instance, which continues there. `pause`: stop a prefill and continue it later.
`decode_pause`: the same for a decode. `prefix_copy`: say what of a prompt each of them has cached, and copy that to
another. All instances serve whole requests, and end one whose client has left."""

ALL_CAPABILITIES: frozenset[Capability] = frozenset(get_args(Capability))

NATIVE_CAPABILITIES = ALL_CAPABILITIES - {"prefix_copy"}
"""Capabilities of a live cluster's instances: each uses the prefixes in its own cache only."""

HTTP_CAPABILITIES: frozenset[Capability] = frozenset()
"""Capabilities of servers over HTTP: none but whole requests. Their own schedulers pause prompts at chunk edges."""

# The cluster as a policy sees it (`ClusterSnapshot`), and the state that it reads (`ClusterState`).
#
# The controller keeps one `ClusterState` up to date. A `ClusterSnapshot` of it copies nothing, so that a decision over
# thousands of instances costs only what it looks at.

Role = Literal["prefill", "decode", "mixed"]


class ClusterInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model instance of `tp` × `stages` accelerators on a node."""

    id: int
    node: int
    role: Role = "mixed"
    tp: int = 1
    stages: int = 1
    capacity: int = 0
    """KV tokens that the instance can hold; 0: not stated."""
    free_at_s: float = 0.0
    """Predicted absolute time at which its committed spans and its scheduler's prefills will have ended; in the past:
    it is free. Corrected whenever something completes."""
    queued: int = 0
    """Prompt tokens that wait or run there."""
    used: int = 0
    """KV tokens in use there: leased by its scheduler and, in live clusters, of spans."""
    running: int = 0
    """Requests in its scheduler."""
    holder: str | None = None
    """Holder of the reservation on it (HoldGroup)."""


GROUP_SLACK = 64
"""Tokens that a request leaves free on each member of a group that holds it: blocks are partly filled, and the member
that takes the output's KV is replaced before it is full."""


def members_for(tokens: int, capacity: int) -> int:
    """Return the fewest instances of `capacity` KV tokens each (0: not stated) that hold a request of so many tokens,
    output included."""
    return 1 if not capacity or tokens <= capacity else -(-tokens // max(1, capacity - GROUP_SLACK))


def final_tokens(request: Request) -> int:
    """Return the KV tokens of a request with all of its output."""
    return request.prompt_tokens + request.max_output_tokens


def too_long(prompt: int, output: int, longest: int) -> str | None:
    """Return why a cluster refuses a request of so many prompt and output tokens; None: it serves it. longest: see
    `longest_request`."""
    if not longest or prompt + output <= longest:
        return None
    return (
        f"the prompt's {prompt} tokens and max_tokens {output} add up to {prompt + output}; this cluster's instances "
        f"hold requests of up to {longest}"
    )


def longest_request(
    placement: str, options: Mapping[str, Any], whole_prompts: bool, instances: Sequence[ClusterInstance]
) -> int:
    """Return the tokens of the longest request, output included, that every group which a policy makes of these
    instances can hold; 0: a capacity is not stated, or no instance prefills. whole_prompts: see `PolicyContext`."""
    prefill = [each for each in instances if each.role != "decode"]
    least = min((each.capacity for each in instances), default=0)
    members = min(1, len(prefill)) if whole_prompts else _largest_group(placement, options, len(prefill))
    if not least or members < 2:
        return least if members else 0
    return max(least, members * (min(each.capacity for each in prefill) - GROUP_SLACK))


def _largest_group(placement: str, options: Mapping[str, Any], count: int) -> int:
    """Return the most instances that one request gets of `count` that prefill."""
    if placement == "jsq":
        return min(1, count)
    if placement in ("fifo", "priority", "reservation"):
        return min(count, int(options.get("long_sp", 4)))
    if placement == "fixed-sp":
        return min(count, int(options.get("sp", 8)) or count)
    if placement in ("tetris", "ladder"):
        sizes = options.get("sizes") or [1 << k for k in range(8)]
        return max((size for size in sizes if size <= count), default=0)
    if placement == "loongserve":
        return min(count - int(options.get("reserved", 0)), int(options.get("max_sp", 0)) or count)
    return count


class ClusterLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Links that KV moves over between instances."""

    inside: NetworkLink
    """Between instances of one node."""
    across: NetworkLink
    """Between nodes (one network card an accelerator)."""

    def between(self, one: ClusterInstance, other: ClusterInstance) -> NetworkLink:
        """Return the link between two instances."""
        return self.inside if one.node == other.node else self.across


_MEMORY_S = 600.0
"""How long arrivals are remembered, seconds: the longest window of `ClusterSnapshot.arrival_rate_rps`."""


class ClusterState:
    """Instances by id (0, 1, …), with a version that rises with every change, and the times of recent arrivals."""

    def __init__(self, instances: Iterable[ClusterInstance], links: ClusterLinks) -> None:
        self.instances: list[ClusterInstance] = list(instances)
        for index, instance in enumerate(self.instances):
            if instance.id != index:
                raise ConfigError(f"instance ids count from 0 without gaps; {instance.id} stands at place {index}")
        self.links = links
        self.version = 0
        self.changed_at = [0] * len(self.instances)  # version of each instance's last change
        nodes: dict[int, list[int]] = {}
        roles: dict[Role, list[int]] = {}
        for instance in self.instances:
            nodes.setdefault(instance.node, []).append(instance.id)
            roles.setdefault(instance.role, []).append(instance.id)
        self.by_node = {node: tuple(ids) for node, ids in sorted(nodes.items())}
        self.by_role = {role: tuple(ids) for role, ids in roles.items()}
        self.arrivals: list[float] = []

    def put(self, instance: ClusterInstance) -> None:
        """Replace an instance's entry. The version rises only if it differs."""
        if self.instances[instance.id] == instance:
            return
        self.instances[instance.id] = instance
        self._changed(instance.id)

    def remove(self, instance: int) -> None:
        """Take an instance out of its role and node. Its entry stays, so that ids keep their meaning."""
        self.by_role = {role: tuple(i for i in ids if i != instance) for role, ids in self.by_role.items()}
        self.by_node = {node: tuple(i for i in ids if i != instance) for node, ids in self.by_node.items()}
        self._changed(instance)

    def add(self, instance: ClusterInstance) -> None:
        """Add an instance: a removed one under its id, or a new one with the next id (else ConfigError)."""
        i = instance.id
        if i == len(self.instances):
            self.instances.append(instance)
            self.changed_at.append(0)
        elif i > len(self.instances):
            raise ConfigError(f"instance ids count from 0 without gaps; {i} comes after {len(self.instances) - 1}")
        self.instances[i] = instance
        nodes, roles = dict(self.by_node), dict(self.by_role)
        nodes[instance.node] = tuple(sorted({*nodes.get(instance.node, ()), i}))
        roles[instance.role] = tuple(sorted({*roles.get(instance.role, ()), i}))
        self.by_node, self.by_role = dict(sorted(nodes.items())), roles
        self._changed(i)

    def arrived(self, at_s: float) -> None:
        """Record the arrival of a request. Times must not fall."""
        arrivals = self.arrivals
        arrivals.append(at_s)
        # trimmed only when half of it is too old: amortised constant time for each arrival
        if len(arrivals) > 1024 and arrivals[len(arrivals) // 2] < at_s - _MEMORY_S:
            del arrivals[: bisect_left(arrivals, at_s - _MEMORY_S)]

    def _changed(self, instance: int) -> None:
        self.version += 1
        self.changed_at[instance] = self.version


class ClusterSnapshot:
    """What a policy reads. Made for one event; the state behind it changes when the event has been handled."""

    __slots__ = ("_state", "now_s", "version")

    def __init__(self, state: ClusterState, now_s: float) -> None:
        self._state = state
        self.now_s = now_s
        self.version = state.version

    @property
    def instances(self) -> Sequence[ClusterInstance]:
        """All instances, by id."""
        return self._state.instances

    @property
    def by_node(self) -> Mapping[int, tuple[int, ...]]:
        """Ids of each node's instances, nodes in order."""
        return self._state.by_node

    @property
    def links(self) -> ClusterLinks:
        """Links between instances."""
        return self._state.links

    def with_role(self, *roles: Role) -> tuple[int, ...]:
        """Return ids of the instances of these roles, in order."""
        if len(roles) == 1:
            return self._state.by_role.get(roles[0], ())
        return tuple(sorted(i for role in roles for i in self._state.by_role.get(role, ())))

    def nodes_of(self, group: Iterable[int]) -> int:
        """Return how many nodes a group spans."""
        return len({self._state.instances[i].node for i in group})

    def ordered(self, group: Iterable[int]) -> tuple[int, ...]:
        """Return a group in the order in which its instances are acquired: by (node, id)."""
        return tuple(sorted(group, key=lambda i: (self._state.instances[i].node, i)))

    def arrival_rate_rps(self, window_s: float) -> float:
        """Return requests a second over the last `window_s`, or over the time since the first arrival where that is
        shorter (but at least a second)."""
        arrivals = self._state.arrivals
        if not arrivals:
            return 0.0
        # right after the start, a whole window would underestimate the rate
        since = max(self.now_s - window_s, arrivals[0])
        count = bisect_right(arrivals, self.now_s) - bisect_left(arrivals, since)
        return count / max(self.now_s - since, 1.0)


# Tetris's improvement rate by load: a table of (requests a second, rate), looked up every so often (§5.1, §7.1).
#
# The table is made by simulating (`headway profile rates`, `headway_research.tetris.rates`) and handed down as data.

SCHEMA = "headway.tetris-rates/1"


class RateTable(msgspec.Struct, frozen=True, kw_only=True):
    """Improvement rates by load."""

    points: tuple[tuple[float, float], ...]
    """(load in requests a second, improvement rate), ascending."""
    source: str = ""
    """Description of the simulations that gave the rates."""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a table of improvement rates needs a point")
        for load, rate in self.points:
            if not (load >= 0 and 0 <= rate < 1):
                raise ValueError(f"({load}, {rate}) is not a load of at least 0 and a rate from 0 to 1")

    def at(self, load_rps: float) -> float:
        """Return the rate of the nearest recorded load; of two equally near, the lower one's."""
        return min(self.points, key=lambda point: (abs(point[0] - load_rps), point[0]))[1]


def load_rates(path: Path) -> RateTable:
    """Read a table from a file. Raises ConfigError, which names what is wrong."""
    try:
        table = msgspec.json.decode(read_input(path), type=RateTable)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a table of improvement rates: {error}") from error
    if table.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {table.schema!r}, not {SCHEMA}")
    return table


@runtime_checkable
class LoadAwareRates(Protocol):
    """A policy that works with improvement rates by load: `tetris`."""

    def replace_rates(self, table: RateTable) -> None:
        """Use another table from the next decision on (Tetris §6)."""


class RateControl:
    """The improvement rate in force: looked up every `refresh_s` by the arrival rate of the last `window_s`."""

    def __init__(self, table: RateTable, window_s: float = 30.0, refresh_s: float = 30.0) -> None:
        self._table, self._window_s, self._refresh_s = table, window_s, refresh_s
        self._due_s = -float("inf")
        self._rate = 0.0

    def rate(self, view: ClusterSnapshot) -> float:
        """Return the rate for a decision now."""
        # between two look-ups the rate is constant: the load is a mean over many arrivals
        if view.now_s >= self._due_s:
            self._rate = self._table.at(view.arrival_rate_rps(self._window_s))
            self._due_s = view.now_s + self._refresh_s
        return self._rate

    def replace(self, table: RateTable) -> None:
        """Use another table from the next decision on, as when the length distribution has shifted."""
        self._table = table
        self._due_s = -float("inf")


ActionName = Literal["commit", "hold", "release", "enqueue", "preempt", "resume", "transfer", "reject"]


class SpanProgress(NamedTuple):
    """How much of a paused span is computed (PecSched §5.1)."""

    tokens: int
    """Prompt tokens before this position are complete in all layers."""
    layer: int
    """The tokens after it are complete in the first `layer` layers; 0: the pause is at a chunk's edge."""


class CachedPrefix(msgspec.Struct, frozen=True):
    """KV of a prompt's first tokens that an instance has in its prefix cache."""

    instance: int
    tokens: int
    copy_s: float = 0.0
    """Predicted seconds to copy it to the request's group, from the action on; 0: it is there."""


# -- what has happened -------------------------------------------------------------------------------------------------


class RequestArrived(msgspec.Struct, frozen=True):
    """A new request. The policy must answer, now or later, with CommitSpans, EnqueueRequest or RejectRequest; without
    an answer the request waits for ever."""

    request: Request
    cached: tuple[int, ...] = ()
    """Tokens of the prompt that each instance has cached, by id; empty: nothing is known of any."""


class SpanDone(msgspec.Struct, frozen=True):
    """A committed span is complete on its whole group."""

    request: str
    index: int
    """Place of the span among the request's committed spans."""
    last: bool
    """The span was the prompt's last: the first output token exists."""


class RequestPrefilled(msgspec.Struct, frozen=True):
    """A request that was enqueued with phase "prefill" has its first token."""

    request: str
    group: tuple[int, ...]
    """Instances that hold its KV."""


class SpanPaused(msgspec.Struct, frozen=True):
    """A preempted request has stopped; its group keeps its state and may compute other work."""

    request: str
    index: int
    progress: SpanProgress


class KvReady(msgspec.Struct, frozen=True):
    """All KV of a request that was to be transferred to an instance has arrived there."""

    request: str
    instance: int


class HoldGranted(msgspec.Struct, frozen=True):
    """A hold was granted on its whole group at once."""

    holder: str
    group: tuple[int, ...]


class RequestFinished(msgspec.Struct, frozen=True):
    """A request has all of its output; everything that it held is free."""

    request: str


class RequestDropped(msgspec.Struct, frozen=True):
    """A request has ended without all of its output: the client left, it was rejected, or its instance was lost."""

    request: str
    why: str
    rejected: bool = False
    """The policy, or a scheduler, refused to serve it."""


class ActionRefused(msgspec.Struct, frozen=True):
    """An action was not carried out, not even in part: it was made from a stale snapshot, or is impossible. The policy
    may try again with the snapshot that comes with this event."""

    request: str
    """The action's request, or the holder of a HoldGroup or ReleaseGroup."""
    action: ActionName
    why: str


class InstanceJoined(msgspec.Struct, frozen=True):
    """An instance is there, new or again, and empty unless it was drained only. `WakeupDue` follows."""

    instance: int


class InstanceLeft(msgspec.Struct, frozen=True):
    """An instance is drained: requests there go on, and it takes no others. It has no role in snapshots any more."""

    instance: int


class InstanceLost(msgspec.Struct, frozen=True):
    """An instance is gone, with all KV on it. Requests that had KV or spans there have been dropped."""

    instance: int


class RatesReplaced(msgspec.Struct, frozen=True):
    """The cluster's operator has given it other improvement rates (Tetris §6). Of live clusters, whose
    `PlacementChain` takes it: policies do not receive it."""

    table: RateTable


class WakeupDue(msgspec.Struct, frozen=True):
    """The time that `next_wakeup` returned has come, or an instance was added."""


Event = (
    RequestArrived
    | SpanDone
    | RequestPrefilled
    | SpanPaused
    | KvReady
    | HoldGranted
    | RequestFinished
    | RequestDropped
    | ActionRefused
    | InstanceJoined
    | InstanceLeft
    | InstanceLost
    | RatesReplaced
    | WakeupDue
)


# -- what is to be done ------------------------------------------------------------------------------------------------


class CommitSpans(msgspec.Struct, frozen=True):
    """Compute these spans of a request in order, each on its group in lockstep.

    On every instance, spans run in the order in which they were committed. The action is refused whole when an instance
    of a group has changed since `version`.
    """

    name: ClassVar[ActionName] = "commit"
    request: str
    spans: tuple[Span, ...]
    version: int
    """`ClusterSnapshot.version` of the decision."""
    concurrent: bool = False
    """Run together with the requests in the instances' schedulers, instead of waiting until these have none."""
    batched_with: tuple[Span, ...] = ()
    """Spans of other requests to compute as one batch with this request's only span, on the same group. They begin and
    end together, SpanDone comes for each, and the batch cannot be preempted."""
    prefix: CachedPrefix | None = None
    """Cached KV behind which the first span begins; the span waits until the group has it."""


class HoldGroup(msgspec.Struct, frozen=True):
    """Reserve a group for one holder: spans and requests of others wait until ReleaseGroup.

    Granted on all instances at once, when its turn has come on each; instances are acquired in order of (node, id).
    Spans of a holder must lie within what it holds. A holder may extend its group only by instances that are free now.
    """

    name: ClassVar[ActionName] = "hold"
    holder: str
    """A request's id, or any other name."""
    group: tuple[int, ...]


class ReleaseGroup(msgspec.Struct, frozen=True):
    """Free instances that a holder holds or waits for."""

    name: ClassVar[ActionName] = "release"
    holder: str
    group: tuple[int, ...] = ()
    """Empty: all of the holder's."""


class EnqueueRequest(msgspec.Struct, frozen=True):
    """Give a request to the scheduler of an instance, or of a group that works as one; it is batched with others there.

    It waits behind spans that were committed to the instance before, unless `concurrent`.
    """

    name: ClassVar[ActionName] = "enqueue"
    request: str
    group: tuple[int, ...]
    phase: Phase = "all"
    """"prefill": RequestPrefilled follows; "decode": the request's KV must be on the group."""
    concurrent: bool = False
    """Run together with the spans on these instances, instead of behind them."""
    prefix: CachedPrefix | None = None
    """Cached KV that another instance sends to this one's prefix cache; the request waits for it there."""


class PreemptRequest(msgspec.Struct, frozen=True):
    """Pause a request. A running span stops at the next layer edge and the request's later spans leave the queues; a
    decode stops after its running iteration. `SpanPaused` follows. A paused decode goes on when it is enqueued again,
    a paused span with ResumeRequest."""

    name: ClassVar[ActionName] = "preempt"
    request: str


class ResumeRequest(msgspec.Struct, frozen=True):
    """Continue a paused request before everything that waits on its instances."""

    name: ClassVar[ActionName] = "resume"
    request: str
    lost_s: float = 0.0
    """Seconds to restore its state."""


class TransferKv(msgspec.Struct, frozen=True):
    """Move a request's KV to an instance. `KvReady` comes once, when no transfer of the request is under way."""

    name: ClassVar[ActionName] = "transfer"
    request: str
    to: int
    """The receiving instance."""
    index: int | None = None
    """One committed span: sent layer by layer while it is computed, after a handshake at its start. None: all KV, now.
    """
    overlapped: bool = False
    """All layers but the last were sent while they were computed. A live cluster's schedulers do not: there all of the
    KV goes now."""


class RejectRequest(msgspec.Struct, frozen=True):
    """End a request that cannot be served."""

    name: ClassVar[ActionName] = "reject"
    request: str
    why: str
    """Shown to the client."""


Action = (
    CommitSpans
    | HoldGroup
    | ReleaseGroup
    | EnqueueRequest
    | PreemptRequest
    | ResumeRequest
    | TransferKv
    | RejectRequest
)


class PlacementPolicy(Protocol):
    """A cluster policy. Made by `policy.placement.registry.make_placement`."""

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """Return what to do now. `view` is valid until the call returns: keep numbers, not the view."""

    def next_wakeup(self, now: float) -> float | None:
        """Return when `WakeupDue` is needed if no other event comes first; None: never. Asked after every event."""
        return None
