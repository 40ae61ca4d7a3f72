"""An engine of the embedded model in this process, with small blocks and chunks, and greedy answers of it."""

from __future__ import annotations

from tests.helpers.engine_fixtures import ManualClock, frame  # type: ignore[attr-defined]

from headway.core.request import SamplingParams
from headway.runtime.assembly.engine import assemble
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest

BLOCK = 16


def engine(kv_tokens: int, **fields: object) -> EngineCore:
    """Small chunks: a document takes several iterations."""
    scheduler = {"max_num_batched_tokens": 96}
    settings: dict[str, object] = {
        "model": str(model_path()), "block_size": BLOCK, "kv_cache_bytes": kv_tokens * token_bytes(), **fields
    }  # fmt: skip
    config = EngineConfig(
        dtype="float32", device="cpu", max_queued_requests=1000, scheduler=scheduler,
        **settings,
    )  # fmt: skip
    return assemble(config, ManualClock())


def token_bytes() -> int:
    import json

    shape = json.loads((model_path() / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4)


def submit(core: EngineCore, name: str, prompt: list[int], output: int, **fields: object) -> None:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    message = SubmitRequest(id=name, prompt_tokens=len(prompt), params=params, received_s=0.0, **fields)
    assert core.submit(message, frame(prompt)) is None


def answers(core: EngineCore, prompts: list[list[int]], output: int = 8, **fields: object) -> list[list[int]]:
    """Greedy tokens of prompts that are served together."""
    got: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        submit(core, f"p{i}", prompt, output, **fields)
        got[f"p{i}"] = []
    while not core.idle:
        for delta in core.step():
            got[delta.id] += delta.tokens
    core.scheduler.check()
    return list(got.values())
