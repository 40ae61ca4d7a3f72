"""Refusal of actions that a backend's instances cannot carry out."""

from __future__ import annotations

from headway.control.backend import ActionImpossible
from headway.control.state import ControllerState
from headway.policy.placement.base import Action, CommitSpans, EnqueueRequest, HoldGroup, TransferKv
from headway.policy.placement.capabilities import Capability


def check_capable(action: Action, has: frozenset[Capability], state: ControllerState) -> None:
    """Raise ActionImpossible for an action that needs more than instances with these capabilities can do."""
    if isinstance(action, CommitSpans | EnqueueRequest | HoldGroup) and "groups" not in has:
        groups = [span.group for span in action.spans] if isinstance(action, CommitSpans) else [action.group]
        if any(len(group) > 1 for group in groups):
            raise ActionImpossible("its instances do not compute together")
    if isinstance(action, CommitSpans) and "spans" not in has:
        request = state.request(action.request).request
        if len(action.spans) > 1 or action.spans[0].end != request.prompt_tokens or action.batched_with:
            raise ActionImpossible("its instances compute whole prompts")
    prefix = action.prefix if isinstance(action, CommitSpans | EnqueueRequest) else None
    if prefix is not None and prefix.copy_s > 0 and "prefix_copy" not in has:
        raise ActionImpossible("its instances copy no cached prefixes")
    if isinstance(action, TransferKv) and "kv_transfer" not in has:
        raise ActionImpossible("its instances move no KV")
