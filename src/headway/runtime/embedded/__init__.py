"""The checkpoint that ships inside the package: a fresh installation can serve and check itself offline."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_NAME", "model_path"]

MODEL_NAME = "headway-embedded"
"""The name that it is served by, and that commands take in place of a folder."""


def model_path() -> Path:
    """Return the folder of the embedded Llama checkpoint; use it wherever a local checkpoint path is expected."""
    return Path(__file__).resolve().parent
