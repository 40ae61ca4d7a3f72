"""`lars`, `fcfs`, `fcfs+static:512`: how a command line names a scheduling policy and its chunking."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import ConfigError

DEFAULT_CHUNKING = {
    "fcfs": "whole",
    "lars": "adaptive",
    "edf": "adaptive",
    "lrs": "adaptive",
    "srpt": "adaptive",
}
"""First come, first served is meant as servers without chunks do it; the others get chunks by time budget."""


@dataclass(frozen=True)
class PolicySpec:
    """A policy and a chunking, as `headway serve` spells them."""

    policy: str
    chunking: str

    @property
    def label(self) -> str:
        """For tables and pictures."""
        return (
            f"{self.policy}, {self.chunking} prompts"
            if self.chunking == "whole"
            else f"{self.policy}, {self.chunking} chunks"
        )

    def server_arguments(self) -> list[str]:
        """The flags that make `headway serve` use it."""
        return ["--scheduling-policy", self.policy, "--chunking", self.chunking]


def parse_policies(text: str) -> list[PolicySpec]:
    """`lars,fcfs+static:512` → specs, in order; ConfigError names what is wrong and what is allowed."""
    return [_parse(item.strip()) for item in text.split(",") if item.strip()]


def _parse(item: str) -> PolicySpec:
    policy, plus, chunking = item.partition("+")
    if policy not in DEFAULT_CHUNKING:
        raise ConfigError(f"unknown policy {policy!r} in --policies; allowed are {', '.join(DEFAULT_CHUNKING)}")
    chunking = chunking if plus else DEFAULT_CHUNKING[policy]
    name, _, size = chunking.partition(":")
    if not (chunking in ("adaptive", "whole") or (name == "static" and size.isdigit() and int(size) > 0)):
        raise ConfigError(f"unknown chunking {chunking!r} in --policies; allowed are adaptive, whole, static:N")
    return PolicySpec(policy, chunking)
