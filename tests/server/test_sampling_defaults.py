"""Sampling settings of a checkpoint's generation_config.json, for requests that leave them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import CheckpointError
from headway.core.request import SamplingParams
from headway.serving.request_bodies import CompletionBody, read_body, sampling_params
from headway.serving.tokenizer import read_sampling_defaults


def params(folder: Path, **fields: Any) -> SamplingParams:
    body = read_body(CompletionBody, {"model": "m", "prompt": "a", **fields})
    return sampling_params(body, max_tokens=4, logprobs=None, vocab_size=100, defaults=read_sampling_defaults(folder))


def test_requests_that_leave_a_setting_out_get_the_checkpoints(tmp_path: Path) -> None:
    assert params(tmp_path).temperature == 1.0
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    found = params(tmp_path)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, 20, 0.95, 0.0)
    asked = params(tmp_path, temperature=0, top_k=-1)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.0, 0, 0.95)


@pytest.mark.parametrize("wrong", ["0.6", True, -1, 3, [0.6]])
def test_a_setting_that_no_request_may_give_is_refused(tmp_path: Path, wrong: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": wrong}))
    with pytest.raises(CheckpointError, match="'temperature' must be a number from 0 to 2, not"):
        read_sampling_defaults(tmp_path)
