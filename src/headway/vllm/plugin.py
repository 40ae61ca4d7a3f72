"""Entry point of group `vllm.general_plugins`, and the check that the installed vLLM is a version that the
plug-in knows.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec

from headway.core.errors import ConfigError

# Is this the vLLM that `scheduler` was written for? Source digests of each overridden or wrapped method.
#
# `schedule()` changes with every release. A method whose source is not that of a version in `KNOWN` may call the seams
# in another order or not at all, and the engine refuses to start with the plug-in rather than schedule wrongly.

TRY_ANYWAY = "HEADWAY_VLLM_UNKNOWN"

SEAMS = (
    "_inflight_prefill_reserved_blocks",
    "_mamba_block_aligned_split",
    "_preempt_request",
    "_reserve_prefill_lookahead",
    "add_request",
    "get_request_counts",
    "schedule",
    "update_from_output",
)
"""Methods of vLLM's `Scheduler` that `scheduler` overrides, wraps, or relies on."""

KNOWN: dict[str, dict[str, str]] = {
    "0.28.0": {
        "_inflight_prefill_reserved_blocks": "74c3e16183f6b4a2",
        "_mamba_block_aligned_split": "712bf8266d6ce2a3",
        "_preempt_request": "1be81e04f8ff2c9f",
        "_reserve_prefill_lookahead": "c214e49d7610a63a",
        "add_request": "199b81ae87110dcf",
        "get_request_counts": "659881a8a9a64eee",
        "schedule": "1bdbc0eb0ac5dbaf",
        "update_from_output": "d4e4eb01661367d2",
    },
    "0.29.0": {
        "_inflight_prefill_reserved_blocks": "74c3e16183f6b4a2",
        "_mamba_block_aligned_split": "fe3e2f4166e41974",
        "_preempt_request": "1be81e04f8ff2c9f",
        "_reserve_prefill_lookahead": "c214e49d7610a63a",
        "add_request": "ab9efd2a1069dbe9",
        "get_request_counts": "659881a8a9a64eee",
        "schedule": "6361fde74c842c97",
        "update_from_output": "616e84edbb35f1b3",
    },
    "0.30.0": {
        "_inflight_prefill_reserved_blocks": "74c3e16183f6b4a2",
        "_mamba_block_aligned_split": "7ac71f4f18b63e9d",
        "_preempt_request": "1be81e04f8ff2c9f",
        "_reserve_prefill_lookahead": "c214e49d7610a63a",
        "add_request": "ab9efd2a1069dbe9",
        "get_request_counts": "659881a8a9a64eee",
        "schedule": "a04a9c05b0193d47",
        "update_from_output": "ac3f8f3f3a48ad50",
    },
    "0.31.0": {
        "_inflight_prefill_reserved_blocks": "6b1f1791b7f5f1a7",
        "_mamba_block_aligned_split": "5e6e2e57817d4333",
        "_preempt_request": "4113f5de8a84ec25",
        "_reserve_prefill_lookahead": "c214e49d7610a63a",
        "add_request": "ab9efd2a1069dbe9",
        "get_request_counts": "c901ce17db93c7dd",
        "schedule": "73b6a4084e76ac6c",
        "update_from_output": "85b29db96051135c",
    },
    "0.32.0": {
        "_inflight_prefill_reserved_blocks": "6b1f1791b7f5f1a7",
        "_mamba_block_aligned_split": "b2a08c774ae495bf",
        "_preempt_request": "4113f5de8a84ec25",
        "_reserve_prefill_lookahead": "c214e49d7610a63a",
        "add_request": "fa2b51cd04a90977",
        "get_request_counts": "c901ce17db93c7dd",
        "schedule": "da4f2cf2fc39c39e",
        "update_from_output": "85b29db96051135c",
    },
    "0.33.0": {
        "_inflight_prefill_reserved_blocks": "6b1f1791b7f5f1a7",
        "_mamba_block_aligned_split": "9af6739dbbdf081f",
        "_preempt_request": "8d67cc4e85688724",
        "_reserve_prefill_lookahead": "c214e49d7610a63a",
        "add_request": "fa2b51cd04a90977",
        "get_request_counts": "c901ce17db93c7dd",
        "schedule": "fa34c8a13c0a8936",
        "update_from_output": "8067d98a98b620cb",
    },
}
"""Digest of each seam, by version whose contract tests passed (`scripts/check_vllm_version.py`)."""


class SeamReport(msgspec.Struct, frozen=True):
    """How the seams of the vLLM that is installed compare with the known ones."""

    version: str
    """`vllm.__version__`."""
    known_as: str | None
    """The version in `KNOWN` whose seams are all the same; None: there is none."""
    moved: tuple[str, ...]
    """Seams that are missing or differ from those of the nearest known version, each with what differs."""
    nearest: str
    """The known version that `moved` compares with."""


def digest(function: object) -> str:
    """Return a digest of the source as it stands in the file, signature included: the same in every Python version."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]  # type: ignore[arg-type]


def digests(scheduler: type) -> dict[str, str]:
    """Digest by seam of a scheduler class; "" for one that is missing or whose source is not there."""
    found = {}
    for name in SEAMS:
        try:
            found[name] = digest(getattr(scheduler, name))
        except (AttributeError, OSError, TypeError):
            found[name] = ""
    return found


def compare(version: str, found: Mapping[str, str]) -> SeamReport:
    """Find the known version that has the same seams, or the nearest and what moved since."""
    best, moved = "", tuple(SEAMS)
    for known, expected in KNOWN.items():
        different = tuple(
            f"{name} (missing)" if not found[name] else name for name in SEAMS if found[name] != expected[name]
        )
        if not different:
            return SeamReport(version, known, (), known)
        if not best or len(different) <= len(moved):
            best, moved = known, different
    return SeamReport(version, None, moved, best)


def require_known(report: SeamReport) -> str | None:
    """None for a known vLLM; a warning where an unknown one is to be tried. Raises ConfigError otherwise."""
    if report.known_as is not None:
        return None
    sentence = (
        f"Headway does not know the scheduler of vLLM {report.version}: compared with {report.nearest or 'none'}, "
        f"these methods differ: {', '.join(report.moved)}"
    )
    if os.environ.get(TRY_ANYWAY) == "1":
        return f"{sentence}. Going on, since {TRY_ANYWAY}=1"
    raise ConfigError(
        f"{sentence}. Known versions: {', '.join(KNOWN) or 'none'}. Drop --scheduler-cls to run vLLM without Headway, "
        f"or set {TRY_ANYWAY}=1 to try it nevertheless"
    )


logger = logging.getLogger("vllm.headway")


def register() -> None:
    """Say once how the scheduler is switched on, or that this vLLM's is unknown. Changes nothing; may be repeated."""
    try:
        installed = version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return
    if installed in KNOWN:
        logger.debug("Headway is installed: --scheduler-cls headway.vllm.Scheduler switches its scheduler on")
    else:
        logger.debug("Headway's scheduler is not tested with vLLM %s (tested: %s)", installed, ", ".join(KNOWN))
