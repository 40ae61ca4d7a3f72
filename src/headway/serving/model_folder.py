"""The folder of the checkpoint that a command's MODEL names: a folder, or a hub id that is in the local hub cache."""

from __future__ import annotations

import re
from pathlib import Path

from headway.core.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9][\w-]*")
"""`organisation/name`, or a bare name."""


def model_folder(named: str | None, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the checkpoint folder to serve; None and `headway-embedded` mean the embedded one. Nothing is downloaded.

    revision: branch, tag or commit of a hub id, by default `main`; download_dir: the hub cache, by default that of the
    environment (HF_HUB_CACHE, HF_HOME). Raises ConfigError when there is no such folder.
    """
    from headway.runtime.embedded import MODEL_NAME, model_path

    if named is not None and Path(named).is_dir():
        return named
    if named is None or named == MODEL_NAME:
        return str(model_path())
    if not _HUB_ID.fullmatch(named):
        raise ConfigError(
            f"{named} is not a folder: give the folder of a Hugging Face checkpoint (config.json, *.safetensors)"
        )
    found = _cached(named, revision, download_dir)
    if found is None:
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{named} is neither a folder nor a model in the local hub cache{at}, and nothing is downloaded here: "
            f"run `hf download {named}{f' --revision {revision}' if revision else ''}`, or give the checkpoint's folder"
        )
    return str(found)


def _cached(named: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a hub id's files, all or some, in the local hub cache; None where there are none."""
    # The library is a dependency of `tokenizers`.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(named, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def is_hub_id(named: str | None) -> bool:
    """Return whether `named` is to be looked up in the hub cache."""
    return named is not None and _HUB_ID.fullmatch(named) is not None and not Path(named).exists()
