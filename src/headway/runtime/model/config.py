"""Configuration of a decoder, read from a model folder: family, shape, position encoding, fingerprint; and the part of
a decoder that one rank holds. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from headway.core.errors import CheckpointError, ConfigError
from headway.core.files import MOST_COUNTED, JsonFields, open_input, read_input
from headway.perf.hardware import ModelShape

# Configuration of the position encoding, read from either spelling of a Hugging Face config.json. No torch.

_TINY, _LEAST_THETA = 1e-6, 1.001
"""Least value of scales, and of the base of frequencies, whose logarithm is a divisor."""
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One model's rotary embedding. Fields that a kind does not use keep their defaults."""

    kind: str
    """One of `KINDS`."""
    theta: float
    rotary_dim: int
    """The leading dimensions of a head that rotate; even."""
    original_max: int
    """Tokens that the model was first trained with."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    """None: derived from `factor`."""
    short_factor: tuple[float, ...] = ()
    """rotary_dim / 2 numbers."""
    long_factor: tuple[float, ...] = ()
    """rotary_dim / 2 numbers."""


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int, origin: str) -> RopeConfig:
    """Return the rotary embedding of a config.json, from `rope_parameters`, or `rope_scaling` and `rope_theta`.

    Raises CheckpointError for a kind that is not one of `KINDS`, for a field of it that is missing or misshapen, and
    where both objects are given and do not mean the same.
    """
    given = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    found = [_read(config, config[name], head_dim, max_positions, origin) for name in given]
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            f"{origin}: 'rope_parameters' and 'rope_scaling' (with 'rope_theta') say different things: keep the one "
            "that the model was trained with"
        )
    return found[0] if found else _read(config, {}, head_dim, max_positions, origin)


def _read(config: Mapping[str, Any], raw: Any, head_dim: int, max_positions: int, origin: str) -> RopeConfig:
    """Return what one of the two objects says; the fields at the top level of config.json complete it."""
    top = JsonFields(config, origin)
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise CheckpointError(
            f"{origin}: rope parameters that differ by layer are not supported; one object for all is"
        )
    rope = JsonFields(raw, f"{origin} (rope parameters)")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    kinds: tuple[str, ...] = KINDS
    if config.get("model_type") == "phi3":
        kinds = ("default", "longrope")
        # Older Phi-3 files call LongRoPE "su" or "yarn".
        kind = "longrope" if kind in ("su", "yarn") else kind
    if kind not in kinds:
        raise CheckpointError(
            f"{origin}: rope type {shortened(kind)} is not supported; supported are {', '.join(kinds)}"
        )
    share = rope.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0, 0, 1), 0, 1)
    if share != 1.0 and config.get("model_type") != "phi3":
        raise CheckpointError(
            f"{origin}: 'partial_rotary_factor' is {share:g}, but only Phi-3 rotates a part of a head"
        )
    rotary_dim = int(head_dim * share)
    least = 4 if kind == "dynamic" else 2
    if rotary_dim < least or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"{origin}: {rotary_dim} of {head_dim} head dimensions would rotate: must be even, {least} up"
        )
    original = max_positions
    if kind in ("llama3", "yarn", "longrope"):
        # Beside the parameters it counts more than in them; Phi-3 has it only there.
        at = top if top.has("original_max_position_embeddings") or config.get("model_type") == "phi3" else rope
        needed = at is top or kind == "longrope"
        original = at.whole("original_max_position_embeddings", None if needed else max_positions, least=2)
    factor = 1.0
    if kind != "default":
        null = kind == "yarn" and "factor" in raw
        factor = rope.number("factor", max_positions / original if kind == "longrope" or null else None, _TINY)
    low, high = 1.0, 4.0
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", None, _TINY), rope.number("high_freq_factor")
        if not low < high:
            raise rope.wrong("high_freq_factor", f"above 'low_freq_factor' ({low:g})")
    half = rotary_dim // 2
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", top.number("rope_theta", 10000.0, _LEAST_THETA), _LEAST_THETA),
        rotary_dim=rotary_dim,
        original_max=original,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", 32.0, 0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0, 0) or 1.0,
        truncate=rope.flag("truncate", True),
        mscale=rope.number("mscale", 0.0, 0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, 0),
        attention_factor=rope.number("attention_factor", None, _TINY) if rope.has("attention_factor") else None,
        short_factor=_factors(rope, "short_factor", half) if kind == "longrope" else (),
        long_factor=_factors(rope, "long_factor", half) if kind == "longrope" else (),
    )


def _factors(rope: JsonFields, name: str, count: int) -> tuple[float, ...]:
    values = rope.numbers(name, _TINY)
    if len(values) != count:
        raise CheckpointError(f"{rope.origin}: '{name}' has {len(values)} numbers where {count} dimensions rotate")
    return values


# Table of the supported model families. One decoder runs them all; a row describes a family's checkpoints.


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """Properties of an architecture that its config.json does not state."""

    name: str
    qkv_bias: bool | None = False
    """A bias where config.json has no `attention_bias`. None: config.json decides, absent means false."""
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    """Likewise with `mlp_bias`."""
    qk_norm: bool = False
    """Query and key heads are RMS-normalised before rotation."""
    fused: bool = False
    """The checkpoint holds qkv_proj and gate_up_proj as single tensors."""
    windowed: bool = False
    """`sliding_window` of config.json applies."""
    window_switch: bool = False
    """`sliding_window` applies only where `use_sliding_window` is true, and to layers that `layer_types` names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that config.json leaves out, where it is not what the other families have."""


_QWEN: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES: dict[str, FamilySpec] = {
    "LlamaForCausalLM": FamilySpec("llama", qkv_bias=None, out_bias=None, mlp_bias=None),
    "YiForCausalLM": FamilySpec("yi"),
    "MistralForCausalLM": FamilySpec(
        "mistral", windowed=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": FamilySpec("qwen2", qkv_bias=True, windowed=True, window_switch=True, defaults=_QWEN),
    "Qwen3ForCausalLM": FamilySpec(
        "qwen3", qkv_bias=None, out_bias=None, qk_norm=True, windowed=True, window_switch=True,
        defaults={**_QWEN, "head_dim": 128},
    ),
    "Phi3ForCausalLM": FamilySpec("phi3", fused=True, windowed=True, defaults={"rms_norm_eps": 1e-5}),
}  # fmt: skip


def family_of(architecture: str) -> FamilySpec:
    """Return the row of an architecture named in config.json; CheckpointError lists the supported ones."""
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"architecture {shortened(architecture)} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[architecture]


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
            f"{origin}: 'architectures' names {architecture} and 'model_type' is {shortened(named)}, not "
            f"{family.name!r}: one is of another model"
        )
    data = {**family.defaults, **data}
    fields = JsonFields(data, origin)
    needed = {*family.defaults, "rms_norm_eps", "rope_theta"} | ({"head_dim"} if family.window_switch else set())
    for name in (needed - {"sliding_window"}) & data.keys():
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
        rms_eps=fields.number("rms_norm_eps", 1e-6, 0, 1),
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
        return min(int(max_positions * max(rope.factor, 1.0)), MOST_COUNTED)
    return default_length(rope, max_positions)


def default_length(rope: RopeConfig, max_positions: int) -> int:
    """Return the length to serve by default: the one that config.json states, extended by the factor of yarn."""
    if rope.kind == "yarn":
        return max(max_positions, min(int(rope.original_max * rope.factor), MOST_COUNTED))
    return max_positions


def _architecture(data: Mapping[str, Any], origin: str) -> str:
    names = data.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{origin}: 'architectures' must name the model's class, not {shortened(names)}")
    return names[0]


def _refuse(data: Mapping[str, Any], origin: str) -> None:
    if (quantised := data.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{origin}: 'quantization_config' ({str(method)[:40]}): quantised checkpoints are not supported; "
            "use the float32, bfloat16 or float16 one"
        )
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{origin}: 'hidden_act' {shortened(activation)} is not supported; supported is 'silu'")


def check_dtype(name: str) -> str:
    """Return a dtype setting unchanged. Raises ConfigError for an unknown one."""
    if name not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"dtype '{name}' is not supported; supported are auto, float32, bfloat16")
    return name


def _dtype(data: Mapping[str, Any], origin: str) -> str:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"{origin}: dtype {shortened(name)} is not supported; supported are {', '.join(_DTYPES)}")
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
        raise CheckpointError(f"{origin}: 'eos_token_id' must be a token id or a list of them, not {shortened(value)}")
    return tuple(ids)


# Fingerprint of a model folder, compared between hosts before anything is loaded. No torch.

_PIECE = 4096
_PIECES = 64
_HEADER = 16 << 20


def identity(folder: Path) -> str:
    """Return 16 hex digits that differ between models, also between other weights of the same shapes.

    Hashed are config.json and, of every safetensors file, its name, size, header and 64 pieces of 4 KiB spread evenly
    over it. Takes milliseconds. Raises CheckpointError when a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        digest.update(read_input(folder / "config.json"))
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            with open_input(path) as file:
                # A safetensors file begins with the length of its JSON header: 8 bytes, little-endian.
                header = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(header, size, _HEADER)))
                for piece in range(_PIECES):
                    # The first piece starts at byte 0, the last one ends with the file.
                    file.seek(max(0, size - _PIECE) * piece // (_PIECES - 1))
                    digest.update(file.read(_PIECE))
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error
    return digest.hexdigest()[:16]


# The part of a model that one rank holds: a range of layers, and slices of heads, MLP and vocabulary.
#
# Megatron's cut (Shoeybi et al. 2019, §3): q, k, v, gate and up by rows of their weights, o and down by columns, so
# that a layer needs two sums over the ranks and nothing else. Where there are more ranks than KV heads, a KV head is
# copied to each rank whose query heads read it.


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Rank `rank` of `ranks` in tensor parallelism, stage `stage` of `stages`. The default is the whole model."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage computes logits."""
        return self.stage == self.stages - 1

    def layers(self, config: DecoderConfig) -> range:
        """Return this stage's layers. Where they do not divide evenly, the first stages have one more."""
        each, more = divmod(config.layers, self.stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))

    def q_heads(self, config: DecoderConfig) -> range:
        return self._even(config.q_heads)

    def kv_heads(self, config: DecoderConfig) -> range:
        """Return the KV heads that this rank's query heads read."""
        group = config.q_heads // config.kv_heads
        heads = self.q_heads(config)
        # With more ranks than KV heads, several ranks hold the same KV head.
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def mlp(self, config: DecoderConfig) -> range:
        return self._even(config.mlp_size)

    def vocabulary(self, config: DecoderConfig) -> range:
        return self._even(config.vocab_size)

    def vocabularies(self, config: DecoderConfig) -> Sequence[range]:
        """Return every rank's slice of the vocabulary, in order."""
        return [replace(self, rank=rank).vocabulary(config) for rank in range(self.ranks)]

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """Return the configuration with this rank's heads and MLP width. Layers and vocabulary are unchanged."""
        return replace(
            config,
            q_heads=len(self.q_heads(config)),
            kv_heads=len(self.kv_heads(config)),
            mlp_size=len(self.mlp(config)),
        )

    def _even(self, size: int) -> range:
        # Cuts by multiplication first: parts differ by at most one, and cover the whole.
        return range(self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks)


WHOLE = ModelShard()


def divides(config: DecoderConfig, ranks: int) -> bool:
    """Whether heads can be cut evenly over `ranks`: as many query heads, reading as many KV heads, on every rank."""
    if config.q_heads % ranks:
        return False
    return config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
