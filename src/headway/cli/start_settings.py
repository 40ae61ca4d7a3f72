"""Settings of `headway serve`: those of every server, and which model and engine to start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.core.setting_types import Text
from headway.serving.serve_settings import ServeSettings

EngineName = Literal["native", "vllm", "auto"]


class StartSettings(ServeSettings):
    """What an operator may set about `headway serve`."""

    model: Text | None = Field(
        None, description="the same as MODEL, for the environment and the file", json_schema_extra={"metavar": "MODEL"}
    )
    revision: Text | None = Field(None, description="branch, tag or commit of a hub id in the local cache")
    download_dir: Text | None = Field(
        None, description="the local hub cache; default: that of HF_HUB_CACHE or HF_HOME. Nothing is downloaded"
    )
    engine: EngineName = Field(
        "native",
        description="native; vllm: start vLLM with Headway's scheduler in it, with any flags of `vllm serve`; auto: "
        "vLLM where there is a GPU and a vLLM that the scheduler knows, else native",
    )
    vllm_command: Text | None = Field(
        None,
        description="the `vllm` to start, of an environment that has Headway too; default: vLLM of this environment, "
        "else the first on PATH",
        json_schema_extra={"metavar": "PATH"},
    )
