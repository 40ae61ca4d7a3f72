"""Whatever a checkpoint's files say, it is loaded as it is, or refused in one sentence, in bounded work and memory.

Values of another type, sign or size in each JSON file, damaged and rewritten tensor files, and what is no file at all.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import make_tiny
from tests.helpers.lies import NO_FILES, VALUES, bounded, changed, check_sentence, damaged, replace_file
from tests.helpers.marks import quick_first

from headway.core.errors import HeadwayError
from headway.perf.hardware import from_config_file
from headway.runtime.assembly.facts import eos_ids, longest_context
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.model.config import identity
from headway.runtime.model.loading import load_decoder
from headway.serving.load.prompts import vocab_size_of
from headway.serving.tokenizer import ModelTokenizer

pytest.importorskip("transformers")

_ROPE = {
    "llama": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 128, "rope_theta": 1e4},
    "qwen3": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
              "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4},
    "phi3": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4},
    "mistral": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "qwen2": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}  # fmt: skip
_MEANT = ("rope", "rms_norm_eps", "factor", "theta", "max_position_embeddings", "model_type", "beta", "mscale", "dtype")
"""Parts of the names of fields that may mean another model."""
_JSON = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.json",
)  # fmt: skip
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def write_model(family: str, folder: Path) -> None:
    """Write a checkpoint with all files that are read, the tensors in one file and in two."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    make_tiny(family, folder, rope_parameters=_ROPE[family])
    words = ["<unk>", "<s>", "</s>", *"abcdefgh ", "ab", "abc"]
    model = models.BPE(dict(zip(words, range(99), strict=False)), [("a", "b"), ("ab", "c")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("z", "a")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    token = {"content": "</s>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    files: dict[str, Any] = {
        "generation_config.json": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "eos_token_id": [2, 3]},
        "tokenizer_config.json": {
            "eos_token": "</s>", "bos_token": token, "additional_special_tokens": ["<s>"], "add_prefix_space": False,
            "tokenizer_class": "LlamaTokenizerFast", "chat_template": [{"name": "default", "template": template}],
            "split_special_tokens": False,
        },
        "special_tokens_map.json": {"eos_token": token, "unk_token": "<unk>"},
        "added_tokens.json": {"</s>": 2},
    }  # fmt: skip
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data))
    tensors = load_file(folder / _WEIGHTS)
    names = sorted(tensors)
    for part in (0, 1):
        save_file({name: tensors[name] for name in names[part::2]}, folder / f"part{part}.safetensors")
    mapping = {name: f"part{place % 2}.safetensors" for place, name in enumerate(names)}
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapping}))


def tensor_file(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change a tensor file's length of the header, or a value in the header."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.3:
        length = rng.choice([0, 1, size - 1, size + 1, len(data), 2**27, 2**31, 2**63, 2**64 - 1])
        return length.to_bytes(8, "little") + data[8:], f"a header of {length} bytes"
    tree, did = changed(json.loads(header), rng)
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + body, did


def lie(folder: Path, rng: random.Random) -> str:
    """Change one of the files, and return what was done."""
    sharded = rng.random() < 0.3
    if sharded:
        (folder / _WEIGHTS).unlink()
    tensors = "part0.safetensors" if sharded else _WEIGHTS
    files = [*_JSON, "config.json", "config.json", tensors, tensors, *([_INDEX] * 3 if sharded else [])]
    path = folder / rng.choice(files)
    draw = rng.random()
    if draw < 0.06:
        kind = rng.choice(NO_FILES)
        replace_file(path, kind)
        return f"{path.name}: {kind}"
    data = path.read_bytes()
    if draw < 0.2:
        data, did = damaged(data, rng)
    elif path.suffix == ".safetensors":
        data, did = tensor_file(data, rng)
    else:
        tree, did = changed(json.loads(data), rng)
        data = json.dumps(tree).encode()
    path.write_bytes(data)
    return f"{path.name}: {did}"


def logits(folder: Path) -> torch.Tensor:
    decoder = load_decoder(folder)
    pool = decoder.make_pool(8)
    plan = decoder.backend.plan([BatchSegment(0, 8, 0, ((0, 8),))], pool)
    with torch.inference_mode():
        return decoder.forward(torch.arange(8), torch.arange(8), plan, None)


def texts(folder: Path) -> None:
    tokenizer = ModelTokenizer.load(folder)
    if tokenizer.has_text:
        tokenizer.decode(tokenizer.encode("abc <s> d", add_special_tokens=True))
    if tokenizer.has_template:
        tokenizer.render_chat([{"role": "user", "content": "a"}], add_generation_prompt=True, variables=None)


READERS: list[Callable[[Path], Any]] = [
    logits, texts, eos_ids, identity, from_config_file, longest_context, lambda folder: vocab_size_of(str(folder)),
]  # fmt: skip


@pytest.mark.parametrize("family", quick_first([*_ROPE], 2))
def test_a_lying_checkpoint_is_what_it_is_or_refused(tmp_path: Path, family: str) -> None:
    plain = tmp_path / "plain"
    write_model(family, plain)
    wanted = logits(plain)
    refused = 0
    for read in READERS:
        read(plain)
    for seed in range(60):
        rng, folder = random.Random(f"{family} {seed}"), tmp_path / "lie"
        shutil.copytree(plain, folder)
        did = lie(folder, rng)
        for read in READERS:
            try:
                with bounded():
                    found = read(folder)
                if read is logits and not any(name in did for name in _MEANT):
                    assert torch.equal(found, wanted), did
            except HeadwayError as error:
                refused += 1
                check_sentence(str(error))
            except BaseException as error:
                error.add_note(f"{seed}: {did}")
                raise
        shutil.rmtree(folder)
    assert refused > 30


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "vocab_size"])
def test_each_size_of_a_configuration_may_be_anything(tmp_path: Path, name: str) -> None:
    path = make_tiny("llama", tmp_path) / "config.json"
    fields = json.loads(path.read_text())
    taken = []
    for value in VALUES:
        if value == fields.get(name):
            continue
        path.write_text(json.dumps({**fields, name: value}))
        try:
            with bounded():
                logits(tmp_path)
            taken.append(value)
        except HeadwayError as error:
            check_sentence(str(error))
    assert taken in ([], [None]) if name == "head_dim" else not taken
