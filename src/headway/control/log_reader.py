"""Reading of decision logs (`decision_log`), of this schema and of the one before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.control.decision_log import SCHEMA
from headway.core.errors import ConfigError

SCHEMA_BEFORE = "headway.cluster.log/2"
"""The same lines with other names, see `_RENAMED`."""
SCHEMAS = (SCHEMA, SCHEMA_BEFORE)
"""Of all logs that can be replayed."""

_RENAMED = {
    # keys of the header
    "backends": "receive_backends",
    "gone": "lost",
    # keys of lines
    "said": "answer_to",
    "is": "value",
    "over": "finished",
    "piece": "kv_slice",
}
_RENAMED_CALLBACKS = {"stayed": "left_scheduler", "tell": "deliver_events"}
_RENAMED_QUESTIONS = {"prefill_estimate": "prefill_estimate"}


@dataclass
class DecisionLog:
    """A log's lines, sorted by kind."""

    header: dict[str, Any]
    callbacks: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(number of the line, the line), in order."""
    answers: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    """(number of the question, answer), by kind of question."""
    decisions: list[Any] = field(default_factory=list)
    """[event, actions] or a wake-up time, in order."""

    def add(self, number: int, line: dict[str, Any]) -> None:
        """Add one line. Raises KeyError or TypeError for a line of another kind."""
        if "do" in line:
            self.callbacks.append((number, line))
        elif "answer_to" in line:
            self.answers.setdefault(line["answer_to"], []).append((line["n"], line["value"]))
        elif "wake" in line:
            self.decisions.append(line["wake"])
        else:
            self.decisions.append([line["event"], line["actions"]])


def read_log(lines: Iterable[bytes | str]) -> DecisionLog:
    """Read a log; a torn last line is left out. Raises ConfigError, with the line's number, for anything that is no log
    of a cluster, or a damaged one."""
    read = iter(lines)
    try:
        header = msgspec.json.decode(next(read))
        if header["schema"] not in SCHEMAS:
            raise KeyError(header["schema"])
    except (StopIteration, KeyError, TypeError, UnicodeDecodeError, msgspec.DecodeError):
        raise ConfigError(f"this is no log of a cluster: its first line should name the schema {SCHEMA}") from None
    before = header["schema"] == SCHEMA_BEFORE
    log = DecisionLog(_upgraded(header) if before else header)
    # number of a line that cannot be read: no error if it is the last one, cut off as it was written
    torn = 0
    for number, text in enumerate(read, start=2):
        if torn:
            raise ConfigError(f"line {torn} of the log cannot be read, and others follow: it is damaged")
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
        except (UnicodeDecodeError, msgspec.MsgspecError):
            torn = number
            continue
        try:
            log.add(number, _upgraded(line) if before else line)
        except (KeyError, TypeError):
            raise ConfigError(f"line {number} of the log is not of a cluster's log") from None
    return log


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the schema before with today's names."""
    upgraded = {_RENAMED.get(key, key): value for key, value in line.items()}
    for key, renamed in (("do", _RENAMED_CALLBACKS), ("answer_to", _RENAMED_QUESTIONS)):
        if key in upgraded:
            upgraded[key] = renamed.get(upgraded[key], upgraded[key])
    return upgraded
