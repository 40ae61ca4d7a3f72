"""Short prompts that Weave prefills where they will decode, while the instances that prefill have longer queues.

Some instances only decode, and are idle or nearly so while short prompts queue elsewhere. A prefill beside decodes
delays their tokens, each iteration of it one token of each, so that decodes get their pace as long as prefills run
beside them for a small share of their time. That is measured: an account for each instance, in decode-seconds.
"""

from __future__ import annotations

from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.decode_placement import DecodePlacement
from headway.policy.placement.view import ClusterSnapshot

_LONGEST_S = 1.0
"""A prompt that takes longer alone keeps to the instances that prefill."""
_LEAST_GAIN_S = 0.1
"""The first token has to come sooner by so much: decodes wait for an iteration with a prompt in it about as long."""
_SAVED_S = 5.0
"""Most decode-seconds that may be saved up, for prompts that come together."""


class PrefillsBesideDecodes:
    """Where prompts may prefill beside decodes, and how much time of decodes has been and may be spent on that."""

    def __init__(self, latency: GroupLatency, share: float, decodes: DecodePlacement) -> None:
        """share: of decodes' time, that may pass with a prefill beside them."""
        self._latency, self._share, self._decodes = latency, share, decodes
        self._left_s: dict[int, float] = {}  # decode-seconds that may be spent, by instance; less than 0: overspent
        self._seen: dict[int, tuple[float, int, float]] = {}  # when last seen, requests then, when its prefills end

    def note(self, view: ClusterSnapshot) -> None:
        """Bring accounts up to now. Called at each event."""
        now = view.now_s
        for i in view.with_role("decode"):
            instance = view.instances[i]
            since_s, running, free_at_s = self._seen.get(i, (now, 0, now))
            beside_s = min(now, max(since_s, free_at_s)) - since_s
            # the prefill itself is one of those that run
            spent_s = max(0, running - 1) * beside_s
            earned_s = self._share * running * (now - since_s - beside_s)
            self._left_s[i] = min(_SAVED_S, self._left_s.get(i, 0.0) - spent_s + earned_s)
            self._seen[i] = now, instance.running, instance.free_at_s

    def choose(self, request: Request, first_token_s: float, view: ClusterSnapshot) -> int | None:
        """Return the instance on which a prompt is to prefill and decode: its first token comes soonest there, and by
        enough before `first_token_s`, when it would come elsewhere. None: it gains too little, or decodes would lose
        too much."""
        alone_s = self._latency.prefill_s(0, request.prompt_tokens, GroupShape(1))
        if not self._share or request.max_output_tokens <= 1 or alone_s > _LONGEST_S:
            return None
        best, begins_s = None, first_token_s - alone_s - _LEAST_GAIN_S
        for i in view.with_role("decode"):
            instance = view.instances[i]
            free_s = max(view.now_s, instance.free_at_s)
            needed = request.prompt_tokens + request.max_output_tokens
            room = not instance.capacity or needed <= self._decodes.room(view, i)
            # those before it included
            spent_s = instance.running * (free_s + alone_s - view.now_s)
            if free_s < begins_s and room and spent_s <= self._left_s[i]:
                best, begins_s = i, free_s
        return best
