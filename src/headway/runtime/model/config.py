"""Configuration of a decoder: everything in which the supported families differ. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.core.errors import CheckpointError, ConfigError
from headway.perf.hardware.shapes import ModelShape
from headway.runtime.model.family import FamilySpec, family_of
from headway.runtime.model.fields import JsonFields
from headway.runtime.model.rope_config import RopeConfig, read_rope

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder's shape and rules. Sizes in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    """`max_position_embeddings` of config.json."""
    max_model_len: int
    """The longest sequence (prompt and output) that this instance serves; rotary frequencies are fixed from it."""
    checkpoint_dtype: str = "float32"
    """The type that the weights were saved in."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_checkpoint: bool = False
    """The checkpoint holds q, k and v as one tensor, and gate and up as one."""
    sliding_window: int | None = None
    """None: every layer attends to the whole context."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """The largest permitted `max_model_len`: the length that the position encoding supports."""
        return longest_of(self.rope, self.max_positions)

    def model_shape(self, dtype: str) -> ModelShape:
        """Return the dimensions by which work is counted. dtype: that weights and KV are held in."""
        return ModelShape(
            layers=self.layers, hidden=self.hidden_size, q_heads=self.q_heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, mlp=self.mlp_size, vocab=self.vocab_size,
            dtype_bytes=4 if dtype == "float32" else 2, tied_embeddings=self.tie_embeddings,
        )  # fmt: skip

    def dtype_for(self, name: str) -> str:
        """Return the type to compute in, "float32" or "bfloat16", from a setting ("auto": the checkpoint's own)."""
        # float16 becomes float32, to which it converts exactly.
        if name == "auto":
            name = "bfloat16" if self.checkpoint_dtype == "bfloat16" else "float32"
        return check_dtype(name)

    def with_max_model_len(self, tokens: int) -> DecoderConfig:
        """Return the configuration with `max_model_len` set to `tokens`.

        Raises ConfigError beyond `longest`, CheckpointError beyond the sliding window: a window that no sequence can
        outgrow changes nothing, so full attention is then exact.
        """
        if tokens < 1 or tokens > self.longest:
            raise ConfigError(
                f"max_model_len {tokens} is not within 1..{self.longest}, what {self.architecture} with rope type "
                f"'{self.rope.kind}' was made for"
            )
        if self.sliding_window is not None and tokens > self.sliding_window:
            raise CheckpointError(
                f"the model has 'sliding_window' {self.sliding_window}, which is not supported beyond that length: "
                f"set max_model_len to at most {self.sliding_window} (asked: {tokens})"
            )
        return replace(self, max_model_len=tokens)


def read_config(
    data: Mapping[str, Any], max_model_len: int | None = None, origin: str = "config.json"
) -> DecoderConfig:
    """Return the decoder that a Hugging Face config.json describes, serving up to max_model_len (None: its default).

    Both spellings are read (`dtype` / `torch_dtype`, `rope_parameters` / `rope_theta` + `rope_scaling`). Raises
    CheckpointError for what is unsupported (architecture, quantisation, activation, sliding windows shorter than
    max_model_len) and for missing or misshapen fields.
    """
    architecture = _architecture(data, origin)
    family = family_of(architecture)
    named = data.get("model_type")
    if isinstance(named, str) and named.lower() != family.name:
        raise CheckpointError(
            f"{origin}: 'architectures' names {architecture} and 'model_type' is {named!r}, not {family.name!r}: "
            "one is of another model"
        )
    data = {**family.defaults, **data}
    fields = JsonFields(data, origin)
    for name in ({*family.defaults, "rms_norm_eps", "rope_theta"} - {"sliding_window"}) & data.keys():
        if data[name] is None:
            raise fields.wrong(name, "a number")
    _refuse(data, origin)
    hidden, q_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise CheckpointError(f"{origin}: {q_heads} query heads cannot share {kv_heads} KV heads evenly")
    if not fields.has("head_dim") and hidden % q_heads:
        raise CheckpointError(f"{origin}: hidden_size {hidden} is not a multiple of {q_heads} heads, and no head_dim")
    head_dim = fields.whole("head_dim", hidden // q_heads)
    max_positions = fields.whole("max_position_embeddings")
    rope = read_rope(data, head_dim, max_positions, origin)
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        layers=fields.whole("num_hidden_layers"),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=fields.whole("intermediate_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max_positions,
        max_model_len=max_positions,
        checkpoint_dtype=_dtype(data, origin),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=_bias(family.qkv_bias, fields, "attention_bias"),
        out_bias=_bias(family.out_bias, fields, "attention_bias"),
        mlp_bias=_bias(family.mlp_bias, fields, "mlp_bias"),
        qk_norm=family.qk_norm,
        fused_checkpoint=family.fused,
        sliding_window=_window(family, fields),
        eos_token_ids=_token_ids(data.get("eos_token_id"), origin),
    )
    return config.with_max_model_len(max_model_len or default_length(rope, max_positions))


def longest_of(rope: RopeConfig, max_positions: int) -> int:
    """Return the longest sequence that a position encoding supports, in tokens. `dynamic` stretches to any length."""
    if rope.kind == "dynamic":
        # Positions are exact in fp32 up to 2^24.
        return 1 << 24
    if rope.kind == "linear":
        return int(max_positions * max(rope.factor, 1.0))
    return default_length(rope, max_positions)


def default_length(rope: RopeConfig, max_positions: int) -> int:
    """Return the length to serve by default: the one that config.json states, extended by the factor of yarn."""
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max * rope.factor))
    return max_positions


def _architecture(data: Mapping[str, Any], origin: str) -> str:
    names = data.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{origin}: 'architectures' must name the model's class, not {names!r}")
    return names[0]


def _refuse(data: Mapping[str, Any], origin: str) -> None:
    if (quantised := data.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{origin}: 'quantization_config' ({method}): quantised checkpoints are not supported; "
            "use the float32, bfloat16 or float16 one"
        )
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{origin}: 'hidden_act' {activation!r} is not supported; supported is 'silu'")


def check_dtype(name: str) -> str:
    """Return a dtype setting unchanged. Raises ConfigError for an unknown one."""
    if name not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"dtype '{name}' is not supported; supported are auto, float32, bfloat16")
    return name


def _dtype(data: Mapping[str, Any], origin: str) -> str:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"{origin}: dtype '{name}' is not supported; supported are {', '.join(_DTYPES)}")
    return name


def _bias(fixed: bool | None, fields: JsonFields, name: str) -> bool:
    return fields.flag(name, False) if fixed is None else fixed


def _window(family: FamilySpec, fields: JsonFields) -> int | None:
    """Return the window that some layer attends within; None where config.json states one that no layer uses."""
    layers, kinds = fields.whole("num_hidden_layers"), fields.data.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(map(str, kinds))
    ):
        raise fields.wrong("layer_types", f"one of {', '.join(sorted(known))} for each of {layers} layers")
    if not family.windowed:
        return None
    if not family.window_switch:
        if kinds is not None:
            raise fields.wrong("layer_types", f"left out: all layers of {family.name} are alike")
        return fields.whole("sliding_window") if fields.has("sliding_window") else None
    used = fields.has("sliding_window") and fields.flag("use_sliding_window", False)
    if kinds is None:
        # The first layers, so many, are without a window.
        windowed = used and fields.whole("max_window_layers", least=0) < layers
    else:
        windowed = "sliding_attention" in kinds
    if windowed and not used:
        raise CheckpointError(
            f"{fields.origin}: 'layer_types' names layers with a window, but 'sliding_window' is null or "
            "'use_sliding_window' is not true"
        )
    return fields.whole("sliding_window") if windowed else None


def _token_ids(value: Any, origin: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) for item in ids):
        raise CheckpointError(f"{origin}: 'eos_token_id' must be a token id or a list of them, not {value!r}")
    return tuple(ids)
