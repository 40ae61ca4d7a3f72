"""Accelerators, links and model shapes as numbers from data sheets and published configurations, and the bytes and
FLOPs that follow. Nothing is measured here.

Peaks are dense bf16 (no sparsity); the shares that kernels reach are in `latency/`. Capacity is as the driver reports
it (MiB), not the marketing GB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.core.errors import ConfigError
from headway.core.files import JsonFields, read_json

# Links between accelerators: bandwidth of one direction, and latency until the first byte arrives.
#
# Bandwidths are the makers' (bytes/s, one direction, per accelerator or per network card). Latencies are assumptions of
# the order that NCCL point-to-point shows, named here so that they can be replaced; nothing is measured at run time.


class NetworkLink(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    """Origin of the numbers, in words."""
    efficiency: float = 0.8
    """Share of `bytes_per_s` that a large message reaches."""

    def transfer_s(self, count: int) -> float:
        """Return the seconds of one message of `count` bytes between two neighbours."""
        return self.latency_s + count / (self.bytes_per_s * self.efficiency)


def _nvlink(name: str, both_ways: float, source: str) -> NetworkLink:
    # Data sheets state NVLink's two directions together.
    return NetworkLink(name=name, bytes_per_s=both_ways / 2, latency_s=3e-6, source=source)


def _network(name: str, gbit_s: float, latency_s: float, source: str) -> NetworkLink:
    # Gbit/s (10^9 bits) to bytes/s.
    return NetworkLink(name=name, bytes_per_s=gbit_s * 1e9 / 8, latency_s=latency_s, source=source, efficiency=0.9)


LINKS: dict[str, NetworkLink] = {
    link.name: link
    for link in (
        _nvlink("nvlink3", 600e9, "NVIDIA A100 data sheet: 600 GB/s both ways together"),
        _nvlink("nvlink4", 900e9, "NVIDIA H100 data sheet: 900 GB/s both ways together"),
        _nvlink("nvlink5", 1800e9, "NVIDIA B200 data sheet: 1.8 TB/s both ways together"),
        _nvlink("nvlink-400", 400e9, "NVIDIA A800 and H800: NVLink reduced to 400 GB/s both ways together"),
        NetworkLink(name="pcie4", bytes_per_s=31.5e9, latency_s=5e-6, source="PCI Express 4.0 x16"),
        NetworkLink(name="pcie5", bytes_per_s=63e9, latency_s=5e-6, source="PCI Express 5.0 x16"),
        _network("ib-100", 100, 6e-6, "InfiniBand EDR, one card an accelerator"),
        _network("ib-200", 200, 6e-6, "InfiniBand HDR, one card an accelerator (Azure NDm A100 v4; Tetris §7.1)"),
        _network("ib-400", 400, 6e-6, "InfiniBand NDR, one card an accelerator (Azure ND H100 v5, Medha's cluster)"),
        _network("roce-200", 200, 10e-6, "RoCE v2, 200 Gb/s an accelerator"),
        _network("roce-400", 400, 10e-6, "RoCE v2, 400 Gb/s an accelerator"),
    )
}


def link(name: str) -> NetworkLink:
    """Return a preset by name. Raises ConfigError, listing those that exist, for an unknown one."""
    if name not in LINKS:
        raise ConfigError(f"unknown link {name!r}; known: {', '.join(LINKS)}")
    return LINKS[name]


_MIB = 1 << 20


class AcceleratorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Data sheet of one accelerator."""

    name: str
    flops: float
    """Peak dense bf16 FLOP/s."""
    bandwidth: float
    """HBM bytes/s."""
    capacity: int
    """HBM bytes."""
    multiprocessors: int
    """Multiprocessors, which is the number of tiles that run at once."""
    nvlink: str
    """Name of the link inside a node."""
    network: str
    """Name of the link between nodes."""
    per_node: int = 8
    """Accelerators in one node."""
    die: str = ""
    """Profiled accelerator with the same die (an A800 computes as an A100 does); empty: this one."""
    source: str = ""
    """Origin of the numbers, in words."""

    @property
    def kernels(self) -> str:
        """Name under which profiles of this die's kernels are stored."""
        return self.die or self.name

    @property
    def inside(self) -> NetworkLink:
        return link(self.nvlink)

    @property
    def across(self) -> NetworkLink:
        return link(self.network)


_A100 = AcceleratorSpec(
    name="a100-80gb", flops=312e12, bandwidth=2.039e12, capacity=81920 * _MIB, multiprocessors=108,
    nvlink="nvlink3", network="ib-200", source="NVIDIA A100 data sheet (SXM4)",
)  # fmt: skip
_H100 = AcceleratorSpec(
    name="h100-80gb", flops=989.4e12, bandwidth=3.35e12, capacity=81559 * _MIB, multiprocessors=132,
    nvlink="nvlink4", network="ib-400", source="NVIDIA H100 data sheet (SXM5)",
)  # fmt: skip


def _slower_links(spec: AcceleratorSpec, name: str, like: str) -> AcceleratorSpec:
    source = f"an {like} with NVLink at 400 GB/s"
    return replace(spec, name=name, nvlink="nvlink-400", die=spec.name, source=source)


ACCELERATORS: dict[str, AcceleratorSpec] = {
    a.name: a
    for a in (
        _A100,
        replace(_A100, name="a100-40gb", bandwidth=1.555e12, capacity=40960 * _MIB),
        _slower_links(_A100, "a800-80gb", "A100-80"),
        _H100,
        _slower_links(_H100, "h800-80gb", "H100-80"),
        replace(
            _H100,
            name="h200-141gb",
            bandwidth=4.8e12,
            capacity=143771 * _MIB,
            source="NVIDIA H200 data sheet (SXM): H100's arithmetic, HBM3e",
        ),
        AcceleratorSpec(
            name="b200-180gb",
            flops=2250e12,
            bandwidth=7.7e12,
            capacity=183359 * _MIB,
            multiprocessors=148,
            nvlink="nvlink5",
            network="ib-400",
            source="NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense bf16, HBM3e",
        ),
        AcceleratorSpec(
            name="h20-96gb",
            flops=148e12,
            bandwidth=4.0e12,
            capacity=97871 * _MIB,
            multiprocessors=78,
            nvlink="nvlink4",
            network="ib-400",
            source="H20 as its vendors list it: 148 TFLOP/s bf16, 4.0 TB/s, 96 GB",
        ),
        AcceleratorSpec(
            name="l40s-48gb",
            flops=362e12,
            bandwidth=0.864e12,
            capacity=46068 * _MIB,
            multiprocessors=142,
            nvlink="pcie4",
            network="roce-200",
            source="NVIDIA L40S data sheet; no NVLink",
        ),
    )
}

ACCELERATOR_ALIASES = {
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "a800": "a800-80gb",
    "h800": "h800-80gb",
    "h200": "h200-141gb",
    "b200": "b200-180gb",
    "l40s": "l40s-48gb",
}


def accelerator(name: str) -> AcceleratorSpec:
    """Return an accelerator by name or alias (`a100`, `h100`, …). Raises ConfigError, listing those that exist."""
    key = name.lower()
    key = ACCELERATOR_ALIASES.get(key, key)
    if key not in ACCELERATORS:
        raise ConfigError(f"unknown accelerator {name!r}; known: {', '.join((*ACCELERATORS, *ACCELERATOR_ALIASES))}")
    return ACCELERATORS[key]


def of_device(name: str) -> AcceleratorSpec | None:
    """Return the accelerator that a driver calls `name` ("NVIDIA H100 80GB HBM3"); None: no data sheet of it is known.

    Forms of less power or bandwidth (PCIe, NVL, MIG slices) have other peaks, and count as unknown.
    """
    words = name.upper().replace("-", " ").split()
    if any(word in ("PCIE", "NVL", "MIG", "GH200") for word in words):
        return None
    for spec in ACCELERATORS.values():
        die, size = spec.name.upper().split("-")
        # H200 has one size only, which its name leaves out.
        sizes = [word for word in words if word.endswith("GB") and word[:-2].isdigit()]
        if die in words and (not sizes or size in sizes):
            return spec
    return None


# Arithmetic of a decoder: parameters, bytes and FLOPs of its weights, KV and operators.
#
# One FLOP is one multiply or one add (a multiply-accumulate counts two). Causal attention is counted as causal. Counts
# are exact integers; a caller divides by rates only at the end.


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a Llama-like decoder (grouped-query attention, MLP), or of one rank's part of it."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the MLP."""
    vocab: int
    dtype_bytes: int = 2
    """Bytes of a weight, an activation or an element of KV."""
    mlp_matrices: int = 3
    """3: gated MLP (gate, up, down); 2: up and down."""
    parallel_block: bool = False
    """Attention and MLP read the same normalised rows (Phi-2, GPT-J, Falcon), so that a layer has one norm."""

    # -- one layer: matrix products as (k, n), for rows × k times k × n ----------------------------------------------

    @property
    def q_width(self) -> int:
        """Elements of one token's queries."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of one token that rotary embedding changes: queries and keys."""
        return (self.q_heads + self.kv_heads) * self.head_dim

    @property
    def qkv(self) -> tuple[int, int]:
        """The fused query, key and value product."""
        return self.hidden, self.q_width + self.kv_width

    @property
    def out(self) -> tuple[int, int]:
        """The attention output product."""
        return self.q_width, self.hidden

    @property
    def up(self) -> tuple[int, int]:
        """The up product; gate and up together where the MLP is gated."""
        return self.hidden, (self.mlp_matrices - 1) * self.mlp

    @property
    def down(self) -> tuple[int, int]:
        """The down product."""
        return self.mlp, self.hidden

    @property
    def head(self) -> tuple[int, int]:
        """The LM head's product (once, not in each layer)."""
        return self.hidden, self.vocab

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention matrices."""
        return sum(k * n for k, n in (self.qkv, self.out))

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's MLP matrices."""
        return sum(k * n for k, n in (self.up, self.down))

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices (norms and biases are left out: below 0.1%)."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of keys and values that one token leaves in one layer."""
        return self.kv_width * self.dtype_bytes

    def heads_divide(self, ranks: int) -> bool:
        """Return whether query and KV heads can be divided evenly by so many ranks, KV heads also by repeating them."""
        return self.q_heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0)

    @property
    def pair_flops(self) -> int:
        """FLOPs of one layer's attention for one pair of query and key: scores and values are 2 FLOPs per head
        dimension each."""
        return 4 * self.q_width

    # -- all layers --------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in all layers."""
        return self.layers * self.layer_kv_bytes

    def linear_flops(self, tokens: int) -> float:
        """Return the FLOPs of all layers' matrix products for `tokens` rows (LM head not counted)."""
        return matmul_flops(tokens * self.layers, self.layer_parameters)

    def attention_flops(self, tokens: int, past: int) -> float:
        """Return the FLOPs of all layers' causal attention for a chunk of `tokens` rows over `past` cached tokens."""
        return self.pairs_flops(causal_pairs(tokens, past))

    def pairs_flops(self, pairs: float) -> float:
        """Return the FLOPs of all layers' attention for so many pairs of query and key."""
        return float(self.layers * self.pair_flops) * pairs


class ModelShape(DecoderShape, frozen=True, kw_only=True):
    """Dimensions of a whole model."""

    tied_embeddings: bool = False
    """The LM head shares the embedding's weights."""

    @property
    def parameters(self) -> int:
        """Parameters of all matrices: layers, embedding, and the LM head where it is its own."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_parameters + tables * self.vocab * self.hidden


def matmul_flops(rows: float, parameters: int) -> float:
    """Return the FLOPs of `rows` rows through matrices of so many parameters."""
    return 2.0 * rows * parameters


def causal_pairs(tokens: int, past: int) -> float:
    """Return the pairs of query and key of a causal chunk of `tokens` rows over `past` cached tokens: its own triangle
    counts half, with the diagonal."""
    return tokens * past + tokens * (tokens + 1) / 2


# Named model shapes, as their published configurations give them, and the shape of any Hugging Face config.
#
# The papers' names lead here: Medha and Mnemosyne serve Llama-3 8B and 70B; Tetris Llama-3 8B, 70B (and 405B in Fig.
# 2); PecSched Mistral-v0.3 7B, Phi-3 14B, Yi 34B and Llama-3.1 70B (Table 5); the others are those that profiles exist
# for. Context extension (RoPE scaling) changes no shape.


def _shape(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    mlp: int,
    vocab: int,
    head_dim: int = 128,
    matrices: int = 3,
    parallel_block: bool = False,
    tied: bool = False,
) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        mlp_matrices=matrices,
        parallel_block=parallel_block,
        tied_embeddings=tied,
    )


MODELS: dict[str, ModelShape] = {
    "llama-3-8b": _shape(32, 4096, (32, 8), 14336, 128256),
    "llama-3-70b": _shape(80, 8192, (64, 8), 28672, 128256),
    "llama-3-405b": _shape(126, 16384, (128, 8), 53248, 128256),
    "llama-2-7b": _shape(32, 4096, (32, 32), 11008, 32000),
    "llama-2-13b": _shape(40, 5120, (40, 40), 13824, 32000),
    "llama-2-70b": _shape(80, 8192, (64, 8), 28672, 32000),
    "codellama-34b": _shape(48, 8192, (64, 8), 22016, 32000),
    "qwen-72b": _shape(80, 8192, (64, 64), 24576, 152064),
    "qwen2.5-7b": _shape(28, 3584, (28, 4), 18944, 152064),
    "qwen2.5-72b": _shape(80, 8192, (64, 8), 29568, 152064),
    "yi-34b": _shape(60, 7168, (56, 8), 20480, 64000),
    "mistral-7b": _shape(32, 4096, (32, 8), 14336, 32768),
    "llama-3.2-1b": _shape(16, 2048, (32, 8), 8192, 128256, head_dim=64, tied=True),
    "llama-3.2-3b": _shape(28, 3072, (24, 8), 8192, 128256, tied=True),
    "qwen2.5-3b": _shape(36, 2048, (16, 2), 11008, 151936, tied=True),
    "qwen2.5-14b": _shape(48, 5120, (40, 8), 13824, 152064),
    "qwen2.5-32b": _shape(64, 5120, (40, 8), 27648, 152064),
    "qwen3-0.6b": _shape(28, 1024, (16, 8), 3072, 151936, tied=True),
    "qwen3-1.7b": _shape(28, 2048, (16, 8), 6144, 151936, tied=True),
    "qwen3-4b": _shape(36, 2560, (32, 8), 9728, 151936, tied=True),
    "qwen3-8b": _shape(36, 4096, (32, 8), 12288, 151936),
    "qwen3-14b": _shape(40, 5120, (40, 8), 17408, 151936),
    "qwen3-32b": _shape(64, 5120, (64, 8), 25600, 151936),
    "mistral-nemo-12b": _shape(40, 5120, (32, 8), 14336, 131072),
    "mistral-small-24b": _shape(40, 5120, (32, 8), 32768, 131072),
    "mistral-large-123b": _shape(88, 12288, (96, 8), 28672, 32768),
    "phi-2": _shape(32, 2560, (32, 32), 10240, 51200, head_dim=80, matrices=2, parallel_block=True),
    "phi-3-14b": _shape(40, 5120, (40, 10), 17920, 32064),
    "internlm-20b": _shape(60, 5120, (40, 40), 13824, 103168),
}

MODEL_ALIASES = {
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "llama-3.3-70b": "llama-3-70b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mistral-large": "mistral-large-123b",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "mistral-v0.3-7b": "mistral-7b",
    "phi-3-medium": "phi-3-14b",
}


_RELEASE = re.compile(r"(-(hf|it|instruct|chat|base|v\d+(\.\d+)?|\d{4}))+$")
"""What checkpoints of one shape differ by: `Qwen2.5-7B-Instruct`, `Mistral-Nemo-Instruct-2407`."""


def model_name(name: str) -> str:
    """Return the canonical name. Raises ConfigError, listing those that exist, for an unknown one."""
    key = _RELEASE.sub("", name.lower().rsplit("/", 1)[-1])
    key = MODEL_ALIASES.get(key, key)
    if key not in MODELS:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(MODELS)}; or give the path of a config.json")
    return key


def model(name: str) -> ModelShape:
    """Return a shape by name or alias, with or without a Hugging Face owner before it, or by the path of a checkpoint's
    folder or `config.json`. Raises ConfigError."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return from_config_file(path)
    return MODELS[model_name(name)]


def from_config_file(path: Path) -> ModelShape:
    """Return the shape in a `config.json`, or in that of a folder. Raises ConfigError that names the file."""
    return from_hf_config(read_json(path / "config.json" if path.is_dir() else path))


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a Llama-like decoder from its `config.json`. Raises ConfigError that names missing keys."""
    # Multimodal models nest the decoder's keys.
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"the model's config must have an object of 'text_config', not {shortened(text)}")
    missing = [k for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") if k not in text]
    if missing:
        raise ConfigError(f"the model's config lacks {', '.join(missing)}")
    fields = JsonFields(text, "the model's config")
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    # SiLU models have a gate matrix beside up and down (SwiGLU).
    gated = str(text.get("hidden_act", text.get("activation_function", "silu"))).lower() in ("silu", "swiglu")
    dtype = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return ModelShape(
        layers=fields.whole("num_hidden_layers"),
        hidden=hidden,
        q_heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", hidden // heads),
        # Configurations of older models omit the width: four times the hidden size.
        mlp=fields.whole("intermediate_size", 4 * hidden),
        vocab=fields.whole("vocab_size"),
        dtype_bytes=4 if "float32" in dtype else 2,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        mlp_matrices=3 if gated else 2,
        parallel_block=_is_parallel(text),
    )


def _is_parallel(config: Mapping[str, Any]) -> bool:
    """Whether attention and MLP of a layer read the same rows: by the model's type, or by the key that says so."""
    stated = config.get("use_parallel_residual", config.get("parallel_attn"))
    return bool(config.get("model_type") in ("phi", "gptj", "cohere") if stated is None else stated)


# Parallel layout of an instance, and the part of a model that one rank of one pipeline stage holds and computes.
#
# Tensor parallelism cuts heads and the MLP's width (a KV head is copied where there are more ranks than KV heads);
# stages cut layers, the first ones taking one more where they do not divide, because the last also carries the LM head;
# KV parallelism copies weights and cuts a request's cache, so it changes no shape here.


class ParallelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of parallelism, and links in place of the accelerator's."""

    tp: int = 1
    """Tensor parallelism."""
    stages: int = 1
    """Pipeline parallelism."""
    kvp: int = 1
    """KV parallelism."""
    inside: str | None = None
    """Link inside a node; None: the accelerator's."""
    across: str | None = None
    """Link between nodes; None: the accelerator's."""

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("stages", self.stages), ("kvp", self.kvp)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")

    @property
    def name(self) -> str:
        """Name in profiles, such as tp8-pp2-kvp1."""
        return f"tp{self.tp}-pp{self.stages}-kvp{self.kvp}"

    @classmethod
    def named(cls, name: str) -> ParallelLayout:
        """Return the layout of a `name`, with the accelerator's links. Raises ConfigError for anything else."""
        found = re.fullmatch(r"tp(\d+)-pp(\d+)-kvp(\d+)", name)
        if found is None:
            raise ConfigError(f"layout {name!r}: must look like tp2-pp1-kvp1")
        tp, stages, kvp = map(int, found.groups())
        return cls(tp=tp, stages=stages, kvp=kvp)

    @property
    def accelerators(self) -> int:
        """Accelerators of one instance."""
        return self.tp * self.stages * self.kvp

    def inside_link(self, device: AcceleratorSpec) -> NetworkLink:
        return link(self.inside) if self.inside else device.inside

    def across_link(self, device: AcceleratorSpec) -> NetworkLink:
        return link(self.across) if self.across else device.across

    def stage_link(self, device: AcceleratorSpec) -> NetworkLink:
        """Return the link between stages: the node's own while all stages fit into one node."""
        return self.inside_link(device) if self.tp * self.stages <= device.per_node else self.across_link(device)


class RankShape(DecoderShape, frozen=True, kw_only=True):
    """Shape of one rank's part of one stage: `layers` are the stage's, heads and widths the rank's."""

    first: bool
    """The stage has the embedding."""
    last: bool
    """The stage has the LM head."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that this rank holds: layers, the embedding on the first stage, the LM head on the
        last."""
        # Tied or not, embedding and LM head are separate copies on their stages.
        tables = (int(self.first) + int(self.last)) * self.vocab * self.hidden
        return (self.layers * self.layer_parameters + tables) * self.dtype_bytes


def rank_shape(shape: ModelShape, layout: ParallelLayout, stage: int = 0) -> RankShape:
    """Return the shape of one rank of `stage` (counted from 0). Raises ConfigError when the layout does not divide the
    model."""
    if not 0 <= stage < layout.stages:
        raise ConfigError(f"stage {stage} of a layout with {layout.stages} stages (they count from 0)")
    if layout.stages > shape.layers:
        raise ConfigError(f"{layout.stages} stages for {shape.layers} layers: at most one stage a layer")
    if shape.q_heads % layout.tp:
        raise ConfigError(f"{shape.q_heads} query heads cannot be cut over {layout.tp} tensor-parallel ranks")
    # The first `more` stages take one layer more; the last stage has the LM head's work besides.
    each, more = divmod(shape.layers, layout.stages)
    return RankShape(
        layers=each + (1 if stage < more else 0),
        first=stage == 0,
        last=stage == layout.stages - 1,
        hidden=shape.hidden,
        q_heads=shape.q_heads // layout.tp,
        # Rounded up: at least one KV head a rank, copied where ranks outnumber KV heads.
        kv_heads=-(-shape.kv_heads // layout.tp),
        head_dim=shape.head_dim,
        mlp=-(-shape.mlp // layout.tp),
        mlp_matrices=shape.mlp_matrices,
        parallel_block=shape.parallel_block,
        vocab=-(-shape.vocab // layout.tp),
        dtype_bytes=shape.dtype_bytes,
    )
