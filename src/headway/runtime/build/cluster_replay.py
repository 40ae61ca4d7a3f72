"""`headway cluster --replay LOG`: repeat the decisions of a recorded cluster run, by the same policy."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.control.replay import ReplayResult
from headway.core.errors import ConfigError
from headway.policy.placement.tetris_rates import RateTable
from headway.runtime.build.cluster_rules import policies_of, policy_context
from headway.runtime.cluster.cluster_file import ClusterFile
from headway.runtime.cluster.policies import RATES_NOTE, PlacementChain


def replay_log(file: ClusterFile, model: str, path: Path) -> tuple[str, bool]:
    """Drive the controller and the file's policy from a log; return a summary, and whether all decisions are equal.

    model: the checkpoint's folder. Raises ConfigError for a log of another policy, and for a file that is not a log.
    """
    chains: list[PlacementChain] = []

    def make(replay: ReplayResult) -> PlacementChain:
        about = replay.about or {}
        # The log's first line has the policy; another one would differ at its first decision.
        if (about.get("placement"), about.get("options")) != (file.placement, file.options):
            raise ConfigError(f"it is of placement {about.get('placement')!r} with options {about.get('options')}")
        chains.append(PlacementChain(policies_of(file, policy_context(file, model, about)), replay.may_use))
        return chains[0]

    def on_note(word: str) -> None:
        if word == "renew":
            chains[0].renew()
        elif word == "taken":
            chains[0].stranded.clear()
        elif word.startswith(RATES_NOTE):
            chains[0].replace_rates(msgspec.json.decode(word.removeprefix(RATES_NOTE), type=RateTable))

    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"replay: {error}") from error
    try:
        replay = ReplayResult(lines, make, on_note)
        difference = replay.run()
    except ConfigError as error:
        raise ConfigError(f"replay: {path}: {error}") from error
    # The log is a file that may have been edited or be of another program.
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"replay: {path}: its first line is not that of a cluster's log: {error}") from None
    if difference is None:
        return f"{replay.decisions} decisions, all as recorded", True
    return str(difference), False
