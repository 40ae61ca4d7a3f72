"""A Hugging Face hub cache on disk."""

from __future__ import annotations

from pathlib import Path


def hub_cache(folder: Path, name: str, commit: str = "a" * 40, branch: str = "main") -> Path:
    """A hub cache as the Hugging Face library lays it out, with one model of one file."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / branch).write_text(commit)
    return snapshot
