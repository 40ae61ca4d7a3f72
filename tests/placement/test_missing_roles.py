"""A policy without instances of a role that it needs raises ConfigError, which names the role."""

from __future__ import annotations

from itertools import product

import pytest
from tests.helpers.cluster_worlds import TETRIS_CONTEXT, TETRIS_LINKS

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.policy.placement.contract import (
    ClusterInstance,
    ClusterSnapshot,
    ClusterState,
    RequestArrived,
    Role,
)
from headway.policy.placement.registry import make_placement, names

ROLES: tuple[tuple[Role, ...], ...] = (
    (), ("decode",), ("decode", "decode"), ("prefill",), ("mixed",), ("prefill", "decode"), ("mixed", "decode"),
    ("prefill", "prefill"), ("mixed", "mixed", "decode"),
)  # fmt: skip


def view(roles: tuple[Role, ...]) -> ClusterSnapshot:
    each = [ClusterInstance(id=i, node=0, role=role, capacity=1 << 20) for i, role in enumerate(roles)]
    return ClusterSnapshot(ClusterState(each, TETRIS_LINKS), 0.0)


@pytest.mark.parametrize("name", names())
def test_every_policy_places_a_request_or_names_the_missing_role(name: str) -> None:
    for roles, tokens in product(ROLES, (100, 100_000)):
        policy = make_placement(name, TETRIS_CONTEXT)
        request = Request(id="r", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=5)
        why = ""
        try:
            actions = policy.on_event(RequestArrived(request), view(roles))
        except ConfigError as error:
            why = str(error)
        if why:
            assert name in why or "cannot be reserved" in why, (roles, tokens)
        else:
            assert {"prefill", "mixed"} & set(roles)
            assert all(0 <= i < len(roles) for action in actions for i in getattr(action, "group", ())), roles
