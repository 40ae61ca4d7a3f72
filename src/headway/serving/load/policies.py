"""Notation of a scheduling policy and its chunking on a command line: `ladder`, `fcfs`, `fcfs+static:512`."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import ConfigError

DEFAULT_CHUNKING = {
    "ladder": "adaptive",
    "fcfs": "whole",
    "lars": "adaptive",
    "edf": "adaptive",
    "lrs": "adaptive",
    "srpt": "adaptive",
}
"""Chunking of a policy that is named without one: whole prompts for the baseline, a time budget for the others."""


@dataclass(frozen=True)
class PolicySpec:
    """A scheduling policy and a chunking, as named by `headway serve`."""

    policy: str
    chunking: str

    @property
    def label(self) -> str:
        """Label for tables and pictures."""
        return (
            f"{self.policy}, {self.chunking} prompts"
            if self.chunking == "whole"
            else f"{self.policy}, {self.chunking} chunks"
        )

    def server_arguments(self) -> list[str]:
        """Return the flags of `headway serve` that select the policy and chunking."""
        return ["--scheduling-policy", self.policy, "--chunking", self.chunking]


def parse_policies(text: str) -> list[PolicySpec]:
    """Parse a list such as `lars,fcfs+static:512`, in order. Raises ConfigError that lists what is allowed."""
    return [_parse(item.strip()) for item in text.split(",") if item.strip()]


def _parse(item: str) -> PolicySpec:
    policy, plus, chunking = item.partition("+")
    if policy not in DEFAULT_CHUNKING:
        raise ConfigError(f"unknown policy {policy!r} in --policies; allowed are {', '.join(DEFAULT_CHUNKING)}")
    # "lars+" is an error below, not the default: a trailing plus is a mistake.
    chunking = chunking if plus else DEFAULT_CHUNKING[policy]
    name, _, size = chunking.partition(":")
    if not (chunking in ("adaptive", "whole") or (name == "static" and size.isdigit() and int(size) > 0)):
        raise ConfigError(f"unknown chunking {chunking!r} in --policies; allowed are adaptive, whole, static:N")
    return PolicySpec(policy, chunking)
