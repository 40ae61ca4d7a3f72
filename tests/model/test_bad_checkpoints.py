"""Whatever is wrong with a model folder is said in one sentence that names the file, the tensor or the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import make_tiny

from headway.core.errors import CheckpointError, ConfigError
from headway.runtime.model.loading import load_decoder

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder)


def shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    mapping = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        mapping.update(dict.fromkeys(chosen, file))
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def test_shards_load_like_one_file_and_share_its_fingerprint(folder: Path) -> None:
    one = load_decoder(folder)
    shard(folder)
    two = load_decoder(folder)
    assert one.fingerprint == two.fingerprint
    assert torch.equal(one.weights.layers[1].attention_norm, two.weights.layers[1].attention_norm)


def test_another_shape_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", intermediate_size=64)
    assert load_decoder(folder).fingerprint != load_decoder(other).fingerprint


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), re.escape(f"tensor '{Q_PROJ}' of shape [32, 32] is missing")),
        (
            lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 16)}),
            re.escape(f"model.safetensors: tensor '{Q_PROJ}' has shape [32, 16], expected [32, 32]"),
        ),
        (
            lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)}),
            "has type torch.int8, expected a float type",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.experts.weight": torch.zeros(2)}),
            "1 tensors that this architecture does not have: 'model.layers.0.experts.weight'",
        ),
    ],
    ids=["missing", "shape", "type", "unknown"],
)
def test_a_tensor_that_is_not_as_expected_is_refused_by_name(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    refused(folder, message)


@pytest.mark.parametrize("kept", [0, 5, 200, -100])
def test_a_truncated_file_is_refused_with_its_size(folder: Path, kept: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:kept])
    refused(folder, r"model\.safetensors: truncated or damaged safetensors file of \d+ bytes")


def test_an_index_that_names_what_is_not_there_is_refused(folder: Path) -> None:
    shard(folder)
    path, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    mapping = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": dict.fromkeys(mapping, "model-00001-of-00002.safetensors")}))
    refused(folder, "is missing, though model.safetensors.index.json lists it here")
    path.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    refused(folder, "is not a file name in this folder")
    path.write_text(json.dumps({"weight_map": mapping}))
    second.unlink()
    refused(folder, f"{second.name}: no such file, though")


def test_pickles_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "holds pytorch_model.bin but no safetensors. Pickled weights can run code")


def test_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such model folder")
    refused(tmp_path, "config.json: no such file")


def test_a_configuration_that_is_no_json_object_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{'hidden_size': 3")
    refused(folder, "config.json: cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "must hold a JSON object, not a list")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported are LlamaFor"),
        ({"architectures": None}, "'architectures' must name"),
        ({"quantization_config": {"quant_method": "awq"}}, r"'quantization_config' \(awq\)"),
        ({"hidden_act": "gelu"}, "'hidden_act' 'gelu' is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "wide"}, "'hidden_size' must be an integer"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"dtype": "float8"}, "dtype 'float8' is not supported"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be"),
        ({"architectures": ["MistralForCausalLM"]}, "'model_type' is 'llama', not 'mistral'"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
            "'sliding_window' 128",
        ),
    ],
)
def test_configurations_that_cannot_be_served_say_which_field(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    edit_config(folder, **fields)
    refused(folder, message)


def test_a_window_that_no_sequence_outgrows_is_allowed(folder: Path) -> None:
    edit_config(folder, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=128)
    assert load_decoder(folder, max_model_len=128).config.max_model_len == 128


def test_a_length_or_type_that_cannot_be_served_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 513 is not within 1\.\.512"):
        load_decoder(folder, max_model_len=513)
    with pytest.raises(ConfigError, match="dtype 'int4' is not supported; supported are auto"):
        load_decoder(folder, "int4")


@pytest.mark.parametrize(
    ("saved", "loaded"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")]
)
def test_auto_keeps_every_bit(tmp_path: Path, saved: str, loaded: str) -> None:
    decoder = load_decoder(make_tiny("llama", tmp_path, dtype=saved))
    assert decoder.dtype == getattr(torch, loaded)
