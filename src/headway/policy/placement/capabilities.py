"""What instances of a kind can do beyond serving whole requests, and what a policy needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Capability = Literal["spans", "groups", "kv_transfer", "pause", "decode_pause", "prefix_copy"]
"""`spans`: compute a part of a prompt. `groups`: compute together with other instances. `kv_transfer`: send KV to
another instance, which continues there. `pause`: stop a prefill and continue it later. `decode_pause`: the same for a
decode. `prefix_copy`: say what of a prompt each of them has cached, and copy that to another. All instances serve whole
requests, and end one whose client has left."""

ALL_CAPABILITIES: frozenset[Capability] = frozenset(get_args(Capability))

NATIVE_CAPABILITIES = ALL_CAPABILITIES - {"prefix_copy"}
"""Of the instances of a live cluster: each uses its own prefixes, and no other's."""

HTTP_CAPABILITIES: frozenset[Capability] = frozenset(("pause", "decode_pause"))
"""Of servers behind HTTP: a pause closes the request's stream, and a later one finds its KV in the prefix cache."""

_ONE_INSTANCE = "`long_sp: 1`"


def missing_for(placement: str, options: Mapping[str, Any], has: frozenset[Capability]) -> str | None:
    """Return what a policy needs to work on instances with these capabilities alone, in words; None: nothing.

    A policy of a user's own is not judged: what it cannot have is refused, action by action."""
    wanted: list[str] = []
    if placement in ("fifo", "priority", "reservation"):
        if "groups" not in has and options.get("long_sp", 4) != 1:
            wanted.append(_ONE_INSTANCE)
    elif placement == "pecsched":
        if "groups" not in has and (options.get("long_replicas") != "fixed" or options.get("long_sp", 4) != 1):
            wanted.append(f"`long_replicas: fixed`, {_ONE_INSTANCE}")
        if "kv_transfer" not in has and options.get("disaggregate", True):
            wanted.append("`disaggregate: false`")
    elif placement in ("tetris", "loongserve", "fixed-sp", "context-parallel") and not (has >= NATIVE_CAPABILITIES):
        return "cannot work: it spreads prompts over instances and moves KV between them"
    return "needs the options " + ", ".join(wanted) if wanted else None
