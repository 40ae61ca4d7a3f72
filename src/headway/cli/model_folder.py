"""The folder of the checkpoint that a command's MODEL names: a folder, or a hub id that is in the local hub cache."""

from __future__ import annotations

import re
from pathlib import Path

from headway.core.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9][\w-]*")
"""`organisation/name`, or a bare name."""


def model_folder(named: str | None, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the folder of the checkpoint to serve: that of the embedded model for None. Nothing is downloaded.

    revision: branch, tag or commit of a hub id, by default `main`; download_dir: the hub cache, by default that of the
    environment (HF_HUB_CACHE, HF_HOME). Raises ConfigError when there is no such folder.
    """
    if named is None:
        from headway.runtime.embedded import model_path

        return str(model_path())
    if Path(named).is_dir():
        return named
    if not _HUB_ID.fullmatch(named):
        raise ConfigError(
            f"{named} is not a folder: give the folder of a Hugging Face checkpoint (config.json, *.safetensors)"
        )
    # The library is a dependency of `tokenizers`.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(named, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{named} is neither a folder nor a model in the local hub cache{at}, and nothing is downloaded here: "
            f"run `hf download {named}{f' --revision {revision}' if revision else ''}`, or give the checkpoint's folder"
        ) from None


def is_hub_id(named: str | None) -> bool:
    """Return whether `named` is to be looked up in the hub cache."""
    return named is not None and not Path(named).is_dir()
