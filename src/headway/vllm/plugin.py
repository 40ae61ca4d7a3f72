"""Entry point of group `vllm.general_plugins`: vLLM calls it in each of its processes, plugged or not."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from headway.vllm.version_check import KNOWN

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
