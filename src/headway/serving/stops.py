"""Stop strings: find the first one in text that arrives in pieces, and never show a character of it.

One Knuth-Morris-Pratt automaton per string is stepped once per character, so the result does not depend on how the text
is cut into pieces. The match that completes first wins; of several that complete together, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def read_stops(value: object) -> tuple[str, ...]:
    """Validate `stop`: one string, or up to 16 non-empty ones; return them without duplicates. Raises RequestError."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError("'stop' must be a string or an array of strings", "stop")
    if len(items) > MAX_STOPS:
        raise RequestError(f"'stop' holds {len(items)} strings; at most {MAX_STOPS} are allowed", "stop")
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise RequestError(f"a 'stop' string must have 1..{MAX_STOP_CHARS} characters (got {len(item)})", "stop")
    return tuple(dict.fromkeys(items))


class StopMatcher:
    """Matcher over the text of one answer.

    Amortised work per character is O(number of stop strings); held-back text is shorter than the longest of them.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """include: whether the matched stop string is shown at the end of the text."""
        # Longest first: `_step` returns the first automaton that completes at a character.
        self._stops = sorted(stops, key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        # Per stop string, how many of its characters the text's end matches.
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is safe to show now; empty after a match (`matched` is set)."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        # The held text has been stepped already: only the new characters are.
        whole = self._held + text
        begin = len(self._held)
        for place, char in enumerate(text, begin):
            stop = self._step(char)
            if stop is not None:
                end = place + 1
                self._held, self.matched = "", stop
                return whole[: end if self._include else end - len(stop)]
        # The longest partial match may still become a stop string; the text before it cannot.
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """Return the held-back text at the end of the answer: an incomplete stop string is ordinary text."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, char: str) -> str | None:
        """Advance all automata by one character; return the stop string that it completes, if any."""
        for which, stop in enumerate(self._stops):
            state, table = self._states[which], self._tables[which]
            # Fall back along borders until the character extends one.
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                return stop
            self._states[which] = state
        return None


def _failure_table(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper border (Knuth-Morris-Pratt)."""
    table = [0] * len(stop)
    border = 0
    for place in range(1, len(stop)):
        while border and stop[border] != stop[place]:
            border = table[border - 1]
        if stop[border] == stop[place]:
            border += 1
        table[place] = border
    return table
