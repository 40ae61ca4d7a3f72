"""Write a random Llama checkpoint of any shape: for benchmarks and experiments that need a shape, not a model.

    python scripts/make_checkpoint.py --hidden 512 --layers 8 --heads 8 --kv-heads 2 --mlp 1536 --vocab 4096 \
        --dtype bfloat16 --out out/reference

The tokenizer that goes with it has one word a token (t3, t4, …), so that text round-trips and answers can be counted.
The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SPECIAL = ("<s>", "</s>", "<unk>")
"""Tokens 0, 1, 2: none is the beginning of a word, since tokenizers look for them inside words too."""


def write_tokenizer(vocab: int, out: Path) -> None:
    """One word for each id, separated by spaces."""
    words = {SPECIAL[i] if i < len(SPECIAL) else f"t{i}": i for i in range(vocab)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, content in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= dict(zip(("bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Llama checkpoint (config.json, model.safetensors).")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, help="default: hidden / heads")
    parser.add_argument("--mlp", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    if a.heads % a.kv_heads:
        parser.error(f"--heads ({a.heads}) must be a multiple of --kv-heads ({a.kv_heads})")
    if a.head_dim is None and a.hidden % a.heads:
        parser.error(f"--hidden ({a.hidden}) must be a multiple of --heads ({a.heads}), or give --head-dim")
    dim = a.head_dim or a.hidden // a.heads
    dtype = getattr(torch, a.dtype)
    generator = torch.Generator().manual_seed(a.seed)

    def matrix(out: int, inputs: int) -> torch.Tensor:
        return (torch.randn(out, inputs, generator=generator) * inputs**-0.5).to(dtype)

    tensors = {
        "model.embed_tokens.weight": torch.randn(a.vocab, a.hidden, generator=generator).to(dtype),
        "model.norm.weight": torch.ones(a.hidden, dtype=dtype),
        "lm_head.weight": matrix(a.vocab, a.hidden),
    }
    for i in range(a.layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(a.hidden, dtype=dtype),
            prefix + "post_attention_layernorm.weight": torch.ones(a.hidden, dtype=dtype),
            prefix + "self_attn.q_proj.weight": matrix(a.heads * dim, a.hidden),
            prefix + "self_attn.k_proj.weight": matrix(a.kv_heads * dim, a.hidden),
            prefix + "self_attn.v_proj.weight": matrix(a.kv_heads * dim, a.hidden),
            prefix + "self_attn.o_proj.weight": matrix(a.hidden, a.heads * dim),
            prefix + "mlp.gate_proj.weight": matrix(a.mlp, a.hidden),
            prefix + "mlp.up_proj.weight": matrix(a.mlp, a.hidden),
            prefix + "mlp.down_proj.weight": matrix(a.hidden, a.mlp),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": a.hidden,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": dim,
        "intermediate_size": a.mlp,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": a.dtype,
    }
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, str(a.out / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(a.vocab, a.out)
    total = sum(tensor.numel() for tensor in tensors.values())
    print(f"{a.out}: {total / 1e6:.1f} M parameters, {a.dtype}")


if __name__ == "__main__":
    main()
