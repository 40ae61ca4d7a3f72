"""`headway cluster --replay LOG`: repeat the decisions of a recorded cluster run, by the same policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.control.replay import replay
from headway.core.errors import ConfigError
from headway.runtime.build.cluster_rules import policies_of, policy_context
from headway.runtime.cluster.cluster_file import ClusterFile
from headway.runtime.cluster.policies import PlacementChain


def replay_log(file: ClusterFile, model: str, path: Path) -> tuple[str, bool]:
    """Drive the file's policy from a log; return a summary, and whether all decisions are equal.

    model: the checkpoint's folder. Raises ConfigError for a log of another policy, and for a file that is not a log.
    """

    def make(about: dict[str, Any]) -> PlacementChain:
        # The log's first line has the policy; another one would differ at its first decision.
        if (about.get("placement"), about.get("options")) != (file.placement, file.options):
            raise ConfigError(f"it is of placement {about.get('placement')!r} with options {about.get('options')}")
        return PlacementChain(policies_of(file, policy_context(file, model, about)))

    try:
        decisions, difference = replay(path.read_bytes().splitlines(keepends=True), make)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"replay: {path}: {getattr(error, 'strerror', None) or error}") from error
    if difference is None:
        return f"{decisions} decisions, all as recorded", True
    at_s, recorded, replayed = difference
    return f"decision {decisions} at {at_s:.6f} s: recorded {recorded}, replayed {replayed}", False
