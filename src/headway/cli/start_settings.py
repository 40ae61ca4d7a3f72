"""Settings of `headway serve`: those of every server, and which model and engine to start."""

from __future__ import annotations

from pydantic import Field

from headway.core.setting_types import Text
from headway.serving.serve_settings import ServeSettings


class StartSettings(ServeSettings):
    """What an operator may set about `headway serve`."""

    model: Text | None = Field(
        None, description="the same as MODEL, for the environment and the file", json_schema_extra={"metavar": "MODEL"}
    )
    revision: Text | None = Field(None, description="branch, tag or commit of a hub id in the local cache")
    download_dir: Text | None = Field(
        None, description="the local hub cache; default: that of HF_HUB_CACHE or HF_HOME. Nothing is downloaded"
    )
