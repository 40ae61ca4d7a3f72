"""What operators can read of a cluster and its instances, and change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from headway.policy.placement.tetris_rates import RateTable
from headway.policy.placement.view import Role
from headway.runtime.cluster.live_instance import InstanceState


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one instance now.

    host: where it runs, 0 is the controller's host; node: as policies see it. waiting, running: requests in its
    scheduler; placed: requests of which any part is or will be there; queued_tokens: of prompts, not computed;
    free_in_s: predicted seconds until all that is placed there is prefilled; failure: why it was given up.
    """

    id: int
    role: Role
    node: int
    host: int = 0
    pool: int
    state: InstanceState
    incarnation: int
    pid: int
    placed: int
    running: int
    waiting: int
    queued_tokens: int
    free_in_s: float
    kv_tokens_used: int
    kv_tokens_total: int
    prefill_tokens_total: int
    decode_tokens_total: int
    restarts_total: int
    failure: str | None = None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the cluster now."""

    schema: Literal["headway.cluster/1"] = "headway.cluster/1"
    placement: str
    state: str
    requests: int
    waiting: int
    """Requests that have not begun anywhere."""
    transfers: int
    """KV movements under way or due."""
    decodes_moved: int = 0
    """How often so far a decode left a scheduler to continue elsewhere."""
    groups_grown: int = 0
    """How often so far a group that decodes in place got instances."""
    groups_shrunk: int = 0
    """How often so far a group that decodes in place lost instances."""
    instances: Sequence[InstanceReport]


@runtime_checkable
class InstanceAdmin(Protocol):
    """What the endpoints for operators need of a cluster's client."""

    def report(self) -> ClusterReport:
        """Return the state of the cluster, instances by id."""

    def join(self, pool: int) -> InstanceReport:
        """Start one more instance like those of a pool; it gets work once it is ready. Raises RequestError."""

    def leave(self, number: int) -> InstanceReport:
        """Drain an instance: nothing new is placed on it, and it ends when nothing is left there. Raises RequestError
        for an unknown number, and for an instance without which the cluster could not serve."""


@runtime_checkable
class ImprovementRateAdmin(Protocol):
    """What the endpoint for Tetris's improvement rates needs of a cluster's client."""

    def replace_rates(self, table: RateTable) -> None:
        """Use another table from the next decision on. Raises RequestError where the policy has no such rates."""
