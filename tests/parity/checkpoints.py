"""Random small checkpoints over the product of what public ones do, run here and by transformers.

Compared are the log-probabilities of every position of a prompt, computed here in chunks and by transformers at once.
Where transformers chooses frequencies by the length of the present sequence (`dynamic`, `longrope`), the prompt is as
long as the model is served.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.parity.outcomes import Outcome

from headway.core.errors import HeadwayError
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.model.config import read_config
from headway.runtime.model.loading import load_decoder

Fields = dict[str, Any]

_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip
_VOCABULARY = 96
_TOLERANCE = 2e-4
"""Of log-probabilities: several times what float32 gives for these sizes."""
_ABSENT = object()


def checkpoint_case(seed: int) -> Outcome:
    """Draw a checkpoint and a prompt, and compare."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="headway-parity-") as name:
        folder = Path(name, "model")
        folder.mkdir()
        kind, fields, limit, length = draw(rng)
        (folder / "config.json").write_text(json.dumps(fields))
        reference, refusal = _reference(folder, rng)
        try:
            if reference is None:
                # There may be no weights: transformers makes them.
                read_config(json.loads((folder / "config.json").read_text()), limit)
                return Outcome("alone", kind, refusal)
            decoder = load_decoder(folder, "float32", limit)
        except HeadwayError as error:
            return Outcome("refused", kind, str(error))
        except Exception as error:
            return Outcome("differs", kind, f"no refusal in one sentence: {error!r}: {fields}")
        length = min(length, decoder.config.max_model_len)
        if decoder.config.rope.kind in ("dynamic", "longrope"):
            length = decoder.config.max_model_len
        tokens = torch.randint(0, _VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
        try:
            with torch.inference_mode():
                wanted = reference(tokens[None], use_cache=False).logits[0].float()
        except Exception as error:
            return Outcome("alone", kind, f"{type(error).__name__}: {error}: {fields}")
        got = _forward(decoder, tokens, rng)
        error = float((torch.log_softmax(got, -1) - torch.log_softmax(wanted, -1)).abs().max())
        if not error <= _TOLERANCE:
            return Outcome("differs", kind, f"log-probabilities by {error:.3g} at {length} tokens: {fields}, {limit}")
        return Outcome("equal", kind)


def draw(rng: random.Random) -> tuple[str, Fields, int | None, int]:
    """Return what was drawn, config.json, the length to serve (None: the default), and the prompt's length."""
    family = rng.choice([*_CLASSES])
    layers, heads = rng.choice([1, 2, 3]), rng.choice([2, 4])
    longest = rng.choice([24, 32, 48])
    fields: Fields = {
        "architectures": [_CLASSES[family]], "model_type": family, "vocab_size": _VOCABULARY, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([heads, heads // 2, 1]), "max_position_embeddings": longest,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
        "dtype": "float32", "hidden_act": "silu",
    }  # fmt: skip
    dims = 32 // heads
    if family == "qwen3" or (family != "phi3" and rng.random() < 0.3):
        dims = fields["head_dim"] = rng.choice([8, 16])
    _put(fields, "tie_word_embeddings", rng.choice([True, False, _ABSENT]))
    _put(fields, "attention_bias", rng.choice([True, False, _ABSENT]))
    _put(fields, "mlp_bias", rng.choice([True, False, _ABSENT]))
    if family in ("mistral", "phi3"):
        fields["sliding_window"] = None
    kind, limit, length = _KINDS[rng.choice([*_KINDS])](rng, family, fields, dims)
    return kind, fields, limit, length


def _put(fields: Fields, name: str, value: Any) -> None:
    fields.pop(name, None)
    if value is not _ABSENT:
        fields[name] = value


def _plain(rng: random.Random, family: str, fields: Fields, dims: int) -> tuple[str, int | None, int]:
    """Weights in all the ways of files; see `_save`."""
    fields["dtype"] = rng.choice(["float32", "bfloat16", "float16"])
    fields["_files"] = rng.choice(["one", "shards", "both", "leftovers"])
    fields["_head"] = rng.choice(["own", "own", "same", "other", "none"])
    return f"files: {fields['_files']}, head: {fields['_head']}", None, 20


def _defaults(rng: random.Random, family: str, fields: Fields, dims: int) -> tuple[str, int | None, int]:
    """Fields that config.json leaves out or has as null."""
    for name in ("num_key_value_heads", "rms_norm_eps", "head_dim", "hidden_act", "sliding_window", "dtype"):
        draw = rng.random()
        if draw < 0.3:
            fields.pop(name, None)
        elif draw < 0.4 and name in fields:
            fields[name] = None
    if fields.get("num_key_value_heads", 0) is _ABSENT or "num_key_value_heads" not in fields:
        # Of the families whose default is a number, heads have to divide by it.
        count = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(family)
        if count and rng.random() < 0.8:
            fields |= {"num_attention_heads": count, "hidden_size": 2 * count}
            _put(fields, "head_dim", rng.choice([4, 8]))
    return "fields left out", None, 20


def _others(rng: random.Random, family: str, fields: Fields, dims: int) -> tuple[str, int | None, int]:
    """What no family here is."""
    fields |= rng.choice(
        [
            {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization_config": {"bits": 8}},
            {"hidden_act": "gelu"}, {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            {"architectures": ["LlamaForCausalLM" if family != "llama" else "MistralForCausalLM"]},
            {"num_key_value_heads": 3, "num_attention_heads": 8}, {"vocab_size": "96"}, {"num_hidden_layers": None},
        ]
    )  # fmt: skip
    return "another architecture", None, 20


def _window(rng: random.Random, family: str, fields: Fields, dims: int) -> tuple[str, int | None, int]:
    """Windows that mean something, and flags that mean none."""
    layers, longest = fields["num_hidden_layers"], fields["max_position_embeddings"]
    window = rng.choice([None, 6, 12, longest, 4 * longest, _ABSENT])
    _put(fields, "sliding_window", window)
    _put(fields, "use_sliding_window", rng.choice([True, True, False, _ABSENT]))
    _put(fields, "max_window_layers", rng.choice([0, 1, layers, 28, _ABSENT]))
    kinds = ["full_attention", "sliding_attention"]
    given = [_ABSENT, [kinds[0]] * layers, [kinds[1]] * layers, [rng.choice(kinds) for _ in range(layers)]]
    _put(fields, "layer_types", rng.choice([*given, *given, [kinds[0]] * (layers + 1)]))
    limit = rng.choice([None, None, 6, 12])
    return "sliding window", limit, rng.choice([5, 6, 12, longest])


def _rope(rng: random.Random, family: str, fields: Fields, dims: int) -> tuple[str, int | None, int]:
    """Every rule, under either key, both, or none, complete or not, below, at and beyond its lengths."""
    longest = fields["max_position_embeddings"]
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
    if family == "phi3":
        kind = rng.choice(["default", "longrope", "longrope", "longrope", kind])
    original = rng.choice([8, 16, longest])
    share = rng.choice([1.0, 0.5]) if family == "phi3" else rng.choice([1.0] * 15 + [0.5])
    half = int(dims * share) // 2
    rope: Fields = {}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2.0, 4.0, 2.5, 4])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([4.0, 2.0, 1.0])}
    if kind == "longrope":
        rope |= {
            "short_factor": [round(rng.uniform(1, 2), 2) for _ in range(half)],
            "long_factor": [round(rng.uniform(1, 8), 2) for _ in range(half)],
        }
        _put(rope, "factor", rng.choice([_ABSENT, _ABSENT, None, 4.0]))
        _put(rope, "attention_factor", rng.choice([_ABSENT, None, 1.25]))
    if kind == "yarn":
        extras = {"attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7}
        rope |= {name: value for name, value in extras.items() if rng.random() < 0.25}
        _put(rope, "mscale_all_dim", rng.choice([_ABSENT, 1.0]))
        _put(rope, "factor", rng.choice([rope["factor"]] * 5 + [None, _ABSENT]))
    at = rng.choice(["in", "top", "both", "none"])
    if at in ("in", "both"):
        rope["original_max_position_embeddings"] = original
    if at in ("top", "both"):
        fields["original_max_position_embeddings"] = original if at == "top" else rng.choice([original, 12])
    _name(rng, rope, kind, family)
    if rng.random() < 0.06 and len(rope) > 1:
        del rope[rng.choice([*rope])]
    theta = rng.choice([1e4, 5e5, 10000])
    form = _place(rng, fields, rope, theta, share)
    limit = rng.choice(
        [None, None, original, longest, *([2 * longest] if kind in ("dynamic", "linear", "yarn") else [])]
    )
    length = rng.choice([original - 2, original, original + 1, longest, 2 * longest])
    return f"rope {kind}, {form}", limit, length


def _name(rng: random.Random, rope: Fields, kind: str, family: str) -> None:
    """Name the rule, by a newer or an older key."""
    older = rng.choice(["su", "yarn"]) if kind == "longrope" and family == "phi3" and rng.random() < 0.5 else kind
    named = rng.choice([{"rope_type": kind}, {"type": older}, {"rope_type": kind, "type": older}])
    if kind == "default" and rng.random() < 0.3:
        named = rng.choice([{}, {"type": "default"}])
    rope |= named


def _place(rng: random.Random, fields: Fields, rope: Fields, theta: float, share: float) -> str:
    """Write the rule where some version of transformers wrote it."""
    whole = rope | {"rope_theta": theta} | ({"partial_rotary_factor": share} if share != 1.0 else {})
    top = {"rope_theta": theta} | ({"partial_rotary_factor": share} if share != 1.0 else {})
    forms = ["parameters", "parameters", "scaling", "scaling", "both", "both", "theta twice", "nulls"]
    form = rng.choice([*forms, *forms, "contradiction", "nested"])
    match form:
        case "parameters":
            fields["rope_parameters"] = whole
            _put(fields, "rope_scaling", rng.choice([_ABSENT, None, {}]))
        case "scaling":
            fields |= {"rope_scaling": rope, **top}
            _put(fields, "rope_parameters", rng.choice([_ABSENT, None, {}]))
        case "both":
            fields |= {"rope_parameters": whole, "rope_scaling": rope, **top}
        case "contradiction":
            other = rng.choice([{"rope_type": "linear", "factor": 3.0}, rope | {"rope_theta": 2 * theta}])
            fields |= {"rope_parameters": whole, "rope_scaling": other, **top}
        case "nulls":
            fields |= {"rope_parameters": None, "rope_scaling": None}
            _put(fields, "rope_theta", rng.choice([theta, _ABSENT]))
        case "nested":
            fields["rope_parameters"] = {"full_attention": whole}
        case _:
            fields |= {"rope_parameters": whole, "rope_theta": 2 * theta}
    return form


_Kind = Callable[[random.Random, str, Fields, int], tuple[str, int | None, int]]
_KINDS: dict[int, _Kind] = dict(enumerate([_rope] * 8 + [_window] * 4 + [_plain] * 4 + [_defaults] * 2 + [_others]))


def _reference(folder: Path, rng: random.Random) -> tuple[Any, str]:
    """Write random weights for the configuration; return transformers' model of the folder, or why it has none."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    files, head = fields.pop("_files", "one"), fields.pop("_head", "own")
    path.write_text(json.dumps(fields))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    torch.manual_seed(rng.randrange(1 << 30))
    kind = getattr(torch, str(fields.get("dtype") or "float32"))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_((torch.randn(tensor.shape) * 0.3 + (1.0 if "norm" in name else 0.0)).to(kind))
    _save(folder, model, files, head, kind)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _save(folder: Path, model: Any, files: str, head: str, kind: torch.dtype) -> None:
    """Write the weights: one file or shards, with or without leftovers; the head as tied models have it, or not."""
    tensors = {name: tensor.to(kind).contiguous().clone() for name, tensor in model.state_dict().items()}
    tied = model.config.tie_word_embeddings
    if tied and head in ("own", "none"):
        tensors.pop("lm_head.weight", None)
    elif tied and head == "other":
        tensors["lm_head.weight"] = torch.flip(tensors["lm_head.weight"], [0]).contiguous()
    elif head == "none":
        del tensors["lm_head.weight"]
    index = folder / "model.safetensors.index.json"
    names = sorted(tensors)
    if files == "shards":
        parts = {f"model-{place + 1:05}-of-00003.safetensors": names[place::3] for place in range(3)}
        for file, chosen in parts.items():
            save_file({name: tensors[name] for name in chosen}, folder / file, {"format": "pt"})
        mapping = {name: file for file, chosen in parts.items() for name in chosen}
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapping}))
        return
    if files == "both":
        # The index of an earlier download, whose shards are older.
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "old.safetensors")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "old.safetensors")}))
    if files == "leftovers":
        save_file({"output.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _forward(decoder: Any, tokens: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """All logits of a prompt, computed in up to four chunks."""
    length = len(tokens)
    cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(3))})
    pool, rows = decoder.make_pool(length), []
    for start, stop in itertools.pairwise(cuts):
        plan = decoder.backend.plan([BatchSegment(0, stop - start, start, ((0, length),))], pool)
        rows.append(decoder.forward(tokens[start:stop], torch.arange(start, stop), plan, None))
    return torch.cat(rows)
