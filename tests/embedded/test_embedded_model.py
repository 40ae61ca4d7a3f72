"""The embedded checkpoint: it loads, finds passkeys, needs all its parts, and is rebuilt byte for byte."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.marks import quick_diagonal, quick_first
from tokenizers import Tokenizer

from headway.runtime.embedded import model_path
from headway.runtime.embedded.passkey import PasskeyDocument, make_document

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_embedded_model.py"
PARTS = [f"layer {layer} head {head}" for layer in (0, 1) for head in range(4)] + ["layer 0 mlp", "layer 1 mlp"]
TOKENIZER = Tokenizer.from_file(str(model_path() / "tokenizer.json"))


def count(text: str) -> int:
    return len(TOKENIZER.encode(text).ids)


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(model_path())


def complete(model: Any, ids: list[int], new_tokens: int = 12, **options: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False, **options)
    return [int(token) for token in out[0, len(ids) :]]


def logits(model: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


@contextmanager
def without(model: Any, part: str) -> Iterator[None]:
    """Silence one head or one MLP."""
    words = part.split()
    layer = model.model.layers[int(words[1])]
    weight = layer.mlp.down_proj.weight if words[2] == "mlp" else layer.self_attn.o_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        if words[2] == "mlp":
            weight.zero_()
        else:
            weight[:, int(words[3]) * 32 : int(words[3]) * 32 + 32] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_files_are_small_and_complete() -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    present = {path.name: path.stat().st_size for path in model_path().iterdir() if path.is_file()}
    assert names | {"chat_template.jinja"} <= set(present)
    assert sum(present.values()) < 7_000_000


def test_script_reproduces_the_committed_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], check=True, timeout=60)
    for path in tmp_path.iterdir():
        committed = (model_path() / path.name).read_bytes()
        assert hashlib.sha256(path.read_bytes()).hexdigest() == hashlib.sha256(committed).hexdigest(), path.name


def test_documents_are_deterministic_and_sized() -> None:
    one, two = make_document(3000, 4, count), make_document(3000, 4, count)
    assert one == two != make_document(3000, 5, count)
    assert one.passkey in one.text
    assert one.text.lower().count("passkey") == 1
    assert 0.9 * 3000 < count(one.text) < 1.1 * 3000
    assert 0 <= one.depth <= 1


@pytest.mark.parametrize(("tokens", "seed"), quick_diagonal([1024, 4096], range(6)))
def test_finds_the_passkey_and_stops(model: Any, tokenizer: Any, tokens: int, seed: int) -> None:
    document = make_document(tokens, seed, count)
    end = model.generation_config.eos_token_id
    answer = complete(model, tokenizer(document.prompt).input_ids)
    assert (tokenizer.decode(answer[:-1]), answer[-1]) == (" " + document.passkey, end)
    answer = complete(model, chat_ids(tokenizer, document.message))
    assert (tokenizer.decode(answer[:-1]), answer[-1]) == (document.passkey, end)


@pytest.mark.parametrize("passkey", quick_first(["00000", "1111111", "121212", "9876543"], 2))
def test_repeated_digits_are_counted(model: Any, tokenizer: Any, passkey: str) -> None:
    document = make_document(1500, 1, count)
    prompt = document.prompt.replace(f" {document.passkey}.", f" {passkey}.")
    assert tokenizer.decode(complete(model, tokenizer(prompt).input_ids), skip_special_tokens=True) == " " + passkey


def test_answers_win_by_a_wide_margin(model: Any, tokenizer: Any) -> None:
    document = make_document(2048, 9, count)
    prompt = tokenizer(document.prompt).input_ids
    answer = complete(model, prompt)
    top = logits(model, prompt + answer)[len(prompt) - 1 : -1].topk(2).values
    assert float((top[:, 0] - top[:, 1]).min()) > 5


@pytest.mark.parametrize("part", quick_first(PARTS, 2))
def test_every_part_matters(model: Any, tokenizer: Any, part: str) -> None:
    prompts: list[Callable[[PasskeyDocument], list[int]]] = [
        lambda document: list(tokenizer(document.prompt).input_ids),
        lambda document: chat_ids(tokenizer, document.message),
    ]
    document = make_document(1024, 2, count)
    ids = [prompt(document) for prompt in prompts]
    whole, answers = logits(model, ids[1]), [complete(model, prompt) for prompt in ids]
    with without(model, part):
        change = (logits(model, ids[1]) - whole).abs().amax(-1)
        assert float(change.median()) > 0.05
        broken = [complete(model, prompt) for prompt in ids]
    if part not in ("layer 1 head 1", "layer 1 head 3"):
        assert broken != answers


def test_other_prompts_depend_on_the_input_and_run_on(model: Any, tokenizer: Any) -> None:
    seen = set()
    for text in ("Hello, how are you?", "Name three rivers.", "def area(width):", "\N{SLICE OF PIZZA} and tea"):
        answer = complete(model, chat_ids(tokenizer, text), 40, min_new_tokens=40)
        assert len(answer) == 40
        seen.add(tuple(answer))
    assert len(seen) == 4
    assert torch.isfinite(logits(model, [1] * 64)).all()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids[1:], skip_special_tokens=False) == text


def test_digits_and_trigger_are_single_tokens() -> None:
    tokens = TOKENIZER.encode("The passkey is 840.").tokens
    assert tokens == ["<|bos|>", "The", "Ġpasskey", "Ġis", "Ġ", "8", "4", "0", "."]


def test_chat_template_renders_in_a_sandbox() -> None:
    sandbox = pytest.importorskip("jinja2.sandbox")
    template = sandbox.ImmutableSandboxedEnvironment().from_string((model_path() / "chat_template.jinja").read_text())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    shown = template.render(messages=messages, add_generation_prompt=True, bos_token="<|bos|>")
    assert shown == "<|bos|><|system|>Be brief.<|end|>\n<|user|>ab<|end|>\n<|assistant|>"
