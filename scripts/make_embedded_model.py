"""Write Headway's embedded model: a Llama checkpoint whose weights are constructed, not trained.

Run it to rebuild ``src/headway/runtime/embedded`` (or ``--out DIR``); the same bytes come out every time. The BPE
merges are read from the committed ``tokenizer.json``; ``--train-tokenizer`` learns them anew from the standard
library's sources.
The weights themselves are in ``embedded_circuit.py`` and ``embedded_layout.py``.
"""

from __future__ import annotations

import argparse
import json
import struct
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import embedded_circuit
import embedded_layout as layout
import numpy as np
import numpy.typing as npt

EMBEDDED = Path(__file__).resolve().parents[1] / "src" / "headway" / "runtime" / "embedded"
CONTEXT = 1 << 20
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|' + message['role'] + '|>' }}\n"
    "    {%- if message['content'] is string %}\n        {{- message['content'] }}\n    {%- else %}\n"
    "        {%- for part in message['content'] if part['type'] == 'text' %}\n            {{- part['text'] }}\n"
    "        {%- endfor %}\n    {%- endif %}\n    {{- '<|end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|assistant|>' }}\n{%- endif %}\n"
)


def corpus() -> Iterator[str]:
    """Yield the standard library's sources in a fixed order, then the words that must become one token each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")
    yield "\npasskey Passkey passkey\nPasskey" * 2000


def train_tokenizer() -> str:
    """Learn a reversible byte-level BPE with one token per digit; return ``tokenizer.json``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=layout.VOCAB,
        special_tokens=layout.SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    bos = layout.SPECIALS[layout.BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, layout.BOS)]
    )
    return str(tokenizer.to_str(pretty=True)) + "\n"


def config() -> dict[str, object]:
    """``config.json``; the RoPE base is given in both the old and the new style."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": layout.BOS,
        "dtype": "float32",
        "eos_token_id": layout.END,
        "head_dim": layout.HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": layout.HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": layout.INNER,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": layout.HEADS,
        "num_hidden_layers": layout.LAYERS,
        "num_key_value_heads": layout.KV_HEADS,
        "pad_token_id": layout.PAD,
        "rms_norm_eps": layout.EPS,
        "rope_parameters": {"rope_theta": layout.THETA, "rope_type": "default"},
        "rope_theta": layout.THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": layout.VOCAB,
    }


def tokenizer_config() -> dict[str, object]:
    """``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": layout.SPECIALS[layout.BOS],
        "eos_token": layout.SPECIALS[layout.END],
        "pad_token": layout.SPECIALS[layout.PAD],
        "additional_special_tokens": [layout.SPECIALS[i] for i in (layout.USER, layout.ASSISTANT, layout.SYSTEM)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }


def safetensors(tensors: dict[str, npt.NDArray[np.float32]]) -> bytes:
    """The safetensors file, written here so that its bytes depend on no library's version."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name in sorted(tensors):
        data = tensors[name].astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write(out: Path, tokenizer: str) -> None:
    """Write the checkpoint for a given ``tokenizer.json`` into ``out``."""
    vocab: dict[str, int] = json.loads(tokenizer)["model"]["vocab"]
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    if len(pieces) != layout.VOCAB or not set(layout.TRIGGERS[:2]) <= set(pieces):
        raise SystemExit("the tokenizer lacks the tokens that the circuit is built on")
    out.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": layout.BOS, "eos_token_id": layout.END, "pad_token_id": layout.PAD}
    objects = {"config.json": config(), "generation_config.json": generation}
    for name, content in {**objects, "tokenizer_config.json": tokenizer_config()}.items():
        (out / name).write_bytes((json.dumps(content, indent=2) + "\n").encode())
    (out / "tokenizer.json").write_bytes(tokenizer.encode())
    (out / "chat_template.jinja").write_bytes(CHAT_TEMPLATE.encode())
    (out / "model.safetensors").write_bytes(safetensors(embedded_circuit.weights(pieces)))


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="folder to write (default: the package's own)")
    parser.add_argument("--train-tokenizer", action="store_true", help="learn the BPE merges anew")
    args = parser.parse_args()
    committed = EMBEDDED / "tokenizer.json"
    write(args.out, train_tokenizer() if args.train_tokenizer else committed.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
