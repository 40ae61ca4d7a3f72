"""The one decoder: rows of many requests through any range of layers, by general or by compiled kernels.

Rows carry their positions; only the attention plan maps rows to requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.attention.backend import AttentionBackend, AttentionPlan
from headway.runtime.attention.backends import make_backend
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import GeneralKernels, linear_kernels
from headway.runtime.model.config import WHOLE, DecoderConfig, ModelShard, RopeConfig

# The weights, fused and laid out for the processor that reads them.

PANEL = 16
"""Columns of the result in a panel of `headway_linear`."""


class PackedLinear:
    """y = x Wᵀ + b. Takes ownership of `weight` (out, in): a reference kept elsewhere holds its memory twice.

    On CPU the weight is laid out once: in panels for the compiled kernel where it runs, and else for oneDNN, which
    would otherwise re-lay it at every call, half of the time at 1 to 64 rows.
    """

    __slots__ = ("_native", "_packed", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._native = _kernels_for(weight)
        self._packed = self._native is None and _onednn_packs(weight)
        if self._native is not None:
            weight = _panels(weight, self._native.pairs)
        # 8: the rows that oneDNN is to optimise the layout for; results do not depend on it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self._packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return (rows, out) from x (rows, in), contiguous, in the weight's dtype."""
        if self._native is not None:
            out = x.new_empty(x.shape[0], self.out_features)
            bias = 0 if self.bias is None else self.bias.data_ptr()
            self._native.linear(
                x.contiguous().data_ptr(), 0, 0.0, 0, self._weight.data_ptr(), bias, 0, out.data_ptr(),
                x.shape[0], self.out_features, self.in_features,
            )  # fmt: skip
            return out
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return packed
        return functional.linear(x, self._weight, self.bias)

    @property
    def panels(self) -> Tensor | None:
        """The weight as `headway_linear` reads it; None where it is laid out otherwise."""
        return None if self._native is None else self._weight

    def dense(self) -> Tensor:
        """Return the weight as (out, in), unpacked into a copy where it is laid out otherwise."""
        if self._native is not None:
            # Undo `_panels`: (panels, in / pairs, 16, pairs) back to rows of `in`, without the last panel's padding.
            return self._weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        return self._weight.to_dense() if self._packed else self._weight

    @property
    def parameters(self) -> int:
        """Number of elements of weight and bias."""
        return self.out_features * (self.in_features + (self.bias is not None))


def _kernels_for(weight: Tensor) -> GeneralKernels | None:
    """Return the compiled kernels where they suit this weight and are the fastest."""
    fits = weight.device.type == "cpu" and weight.shape[1] % 32 == 0
    return linear_kernels(weight.dtype) if fits else None


def _onednn_packs(weight: Tensor) -> bool:
    """Whether oneDNN can lay this weight out here: it refuses bf16 on processors without AVX-512 (or
    AVX-NE-CONVERT)."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _panels(weight: Tensor, pairs: int) -> Tensor:
    """Re-lay (out, in) as (out / 16, in / pairs, 16, pairs), the last panel padded with zeros."""
    rows, inputs = weight.shape
    if rows % PANEL:
        weight = functional.pad(weight, (0, 0, 0, PANEL - rows % PANEL))
    # Two inputs lie side by side for each output where vdpbf16ps multiplies pairs of bf16.
    return weight.view(-1, PANEL, inputs // pairs, pairs).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: Tensor
    """(hidden,)."""
    qkv: PackedLinear
    """Query, key and value heads stacked in this order."""
    out: PackedLinear
    mlp_norm: Tensor
    """(hidden,)."""
    gate_up: PackedLinear
    """Gate and up projections stacked in this order."""
    down: PackedLinear
    q_norm: Tensor | None = None
    """(head_dim,), only where the family normalises heads."""
    k_norm: Tensor | None = None
    """(head_dim,), likewise."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights that one process holds. A pipeline stage holds some layers, and perhaps no embedding or head."""

    layers: Sequence[LayerWeights]
    embedding: Tensor | None
    """(vocab, hidden)."""
    final_norm: Tensor | None
    head: PackedLinear | None
    """With tied embeddings a separate packed copy: look-up needs plain rows."""

    @property
    def parameters(self) -> int:
        """Number of weights held. A tied head counts twice, as it is held."""
        count = sum(held.numel() for held in (self.embedding, self.final_norm) if held is not None)
        count += self.head.parameters if self.head else 0
        for layer in self.layers:
            count += sum(part.parameters for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            count += sum(norm.numel() for norm in norms if norm is not None)
        return count


# Rotary position embedding: the frequencies of every scaling rule, and the rotation itself.
#
# Frequencies and angles are float64: in float32 the product of a position and a frequency is off by up to 0.03 rad at
# 1M tokens and 0.25 rad at 10M.
#
# Frequencies are fixed once, from `max_model_len`. `dynamic` and `longrope` otherwise depend on the current length, so
# that a prompt computed in chunks would differ from the same prompt computed at once. Both then equal transformers
# wherever its own sequence implies the same choice: `dynamic` at lengths up to the original one when max_model_len does
# not exceed it, `longrope` with its short factors when max_model_len is within the original length, long ones beyond.


class RotaryTable(NamedTuple):
    """Cosines and signed sines of one iteration's rows: each (T, 1, rotary_dim), in the activations' type.

    The first half of `sin` is negated, so that rotation is x · cos + swap_halves(x) · sin.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """The rotation of one model. Holds rotary_dim / 2 frequencies; angles are computed per iteration, in float64."""

    def __init__(self, config: RopeConfig, max_model_len: int, device: torch.device | str = "cpu") -> None:
        frequencies, self.scaling = frequencies_of(config, max_model_len)
        self.frequencies = frequencies.to(device)

    def table(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """Return the table of (T,) int64 positions. Called once an iteration."""
        angles = positions.to(torch.float64).unsqueeze(1) * self.frequencies
        cos, sin = torch.cos(angles) * self.scaling, torch.sin(angles) * self.scaling
        return RotaryTable(
            torch.cat((cos, cos), dim=1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), dim=1).to(dtype).unsqueeze(1)
        )


def rotate_(heads: Tensor, table: RotaryTable) -> Tensor:
    """Rotate (T, heads, head_dim) in place; dimensions beyond the rotary ones stay as they are."""
    dim = table.cos.shape[-1]
    turned = heads if dim == heads.shape[-1] else heads[..., :dim]
    swapped = torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
    # `swapped` is a copy, taken before the multiplication overwrites its source.
    turned.mul_(table.cos).addcmul_(swapped, table.sin)
    return heads


def frequencies_of(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Return angular frequencies (rotary_dim / 2,) float64 in radians a token, and the factor on cosines and sines."""
    return _RULES[config.kind](config, max_model_len)


def _periods(config: RopeConfig, theta: float) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    return torch.as_tensor(theta, dtype=torch.float64) ** exponents


def _default(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    return 1.0 / _periods(config, config.theta), 1.0


def _linear(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    return 1.0 / _periods(config, config.theta) / config.factor, 1.0


def _dynamic(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with max_model_len / original length, so that the slowest wave still fits."""
    stretch = config.factor * max(max_model_len, config.original_max) / config.original_max - (config.factor - 1)
    theta = config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    return 1.0 / _periods(config, theta), 1.0


def _llama3(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    """Keep fast waves, divide slow ones by the factor, blend those between by their turns per original length."""
    plain = 1.0 / _periods(config, config.theta)
    # Turns within the original length: length / wavelength, the wavelength being 2 pi / frequency.
    turns = config.original_max * plain / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain, 1.0


def _yarn(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    """Like llama3 with a ramp over dimensions between beta_fast and beta_slow turns, and sharpened attention."""
    plain = 1.0 / _periods(config, config.theta)
    low, high = _turns_to_dim(config, config.beta_fast), _turns_to_dim(config, config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, config.rotary_dim - 1.0)
    # 0.001 avoids a division by zero where the ramp has no width, as in the reference implementation.
    ramp = (torch.arange(config.rotary_dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return plain / config.factor * (1 - kept) + plain * kept, _yarn_scaling(config)


def _turns_to_dim(config: RopeConfig, turns: float) -> float:
    """Return the (fractional) dimension whose wave makes that many turns within the original length."""
    return config.rotary_dim * math.log(config.original_max / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _yarn_scaling(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    log = math.log(config.factor) if config.factor > 1 else 0.0
    if config.mscale and config.mscale_all_dim:
        return (0.1 * config.mscale * log + 1.0) / (0.1 * config.mscale_all_dim * log + 1.0)
    # YaRN's attention temperature: 0.1 ln(s) + 1 on both queries and keys (Peng et al. 2023, §3.4).
    return 0.1 * log + 1.0


def _longrope(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Searched factors per dimension: one list within the original length, another beyond."""
    factors = config.long_factor if max_model_len > config.original_max else config.short_factor
    scaling = config.attention_factor
    if scaling is None:
        # sqrt(1 + ln(s) / ln(original length)), of the LongRoPE reference.
        growth = math.log(config.factor) / math.log(config.original_max) if config.factor > 1 else 0.0
        scaling = math.sqrt(1 + growth)
    return 1.0 / (torch.tensor(factors, dtype=torch.float64) * _periods(config, config.theta)), scaling


_RULES: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


Matrix = Callable[[Tensor], Tensor]
"""A linear layer, (rows, in) to (rows, out): a `PackedLinear`, or whole weights gathered for one use."""


def norm(x: Tensor, weight: Tensor, config: DecoderConfig) -> Tensor:
    """Return x, RMS-normalised over its last dimension and scaled by weight."""
    return functional.rms_norm(x, weight.shape, weight, config.rms_eps)


def heads(
    x: Tensor, qkv: Matrix, layer: LayerWeights, kv_heads: int, rotary: RotaryTable, config: DecoderConfig
) -> Tensor:
    """Project normalised rows x to (rows, q + 2 · kv heads, head_dim): rotated queries and keys, then values.

    kv_heads: those of `qkv`, which may be a slice of the layer's. Head norms and head_dim are `layer`'s and `config`'s.
    """
    flat = qkv(x)
    stacked = flat.view(x.shape[0], flat.shape[1] // config.head_dim, config.head_dim)
    turned = stacked.shape[1] - kv_heads
    # Columns are query heads, then key heads, then value heads: there are as many keys as values.
    queries = turned - kv_heads
    if layer.q_norm is not None and layer.k_norm is not None:
        stacked[:, :queries].copy_(norm(stacked[:, :queries], layer.q_norm, config))
        stacked[:, queries:turned].copy_(norm(stacked[:, queries:turned], layer.k_norm, config))
    rotate_(stacked[:, :turned], rotary)
    return stacked


def feed(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """Return the gated MLP of normalised rows x: down(silu(gate(x)) * up(x))."""
    both = gate_up(x)
    size = both.shape[1] // 2
    return down(functional.silu(both[:, :size]).mul_(both[:, size:]))


# The same decoder layer by the compiled kernels: six calls a layer instead of some thirty.
#
# Results are rounded at the same places as the general path or fewer, so both agree within the type's own error.


class _LinearAddress(NamedTuple):
    """Addresses and sizes of a linear layer."""

    weight: int
    """Address of the panels."""
    bias: int
    """Address; 0: no bias."""
    out: int
    inputs: int


class _LayerAddresses(NamedTuple):
    attention_norm: int
    qkv: _LinearAddress
    out: _LinearAddress
    mlp_norm: int
    gate_up: _LinearAddress
    down: _LinearAddress


class CompiledLayers:
    """Made once a decoder by `compiled_layers`; holds addresses into its weights, which the decoder keeps alive."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, native: GeneralKernels) -> None:
        self._config = config
        self._kernels = native
        self._layers = [_addresses(layer) for layer in weights.layers]
        self._head = _matrix(weights.head) if weights.head and weights.head.panels is not None else None
        self._final_norm = weights.final_norm.data_ptr() if weights.final_norm is not None else 0

    def layer(
        self, index: int, hidden: Tensor, rotary: RotaryTable, plan: AttentionPlan, backend: AttentionBackend
    ) -> None:
        """Run one layer over hidden (T, hidden_size), contiguous, overwritten with its output."""
        config, native, layer = self._config, self._kernels, self._layers[index]
        eps, dim = config.rms_eps, config.head_dim
        rows, at = hidden.shape[0], hidden.data_ptr()
        # Queries and keys are rotated, values are not: they lie behind the first `turned` heads.
        turned = config.q_heads + config.kv_heads
        heads = hidden.new_empty(rows, turned + config.kv_heads, dim)
        first = heads.data_ptr()
        weight, bias, out, inputs = layer.qkv
        # The kernel normalises its input itself: the norm's weight and epsilon go with the call.
        native.linear(at, layer.attention_norm, eps, 0, weight, bias, 0, first, rows, out, inputs)
        cos, sin = rotary
        native.rotate(first, cos.data_ptr(), sin.data_ptr(), rows, out, turned, dim, cos.shape[-1])
        query, key, value = torch.split_with_sizes(heads, (config.q_heads, config.kv_heads, config.kv_heads), 1)
        mixed = backend.run(index, query, key, value, plan).contiguous()
        # What follows a row's attention looks at no other row: a piece at a time, its activations stay in the cache:
        # in that of the thread whose rows they are, where threads divide the rows.
        size = hidden.element_size()
        width, across = layer.out.out * size, layer.out.inputs * size
        piece = native.together * torch.get_num_threads()
        both = hidden.new_empty(min(rows, piece), layer.gate_up.out)
        for begin in range(0, rows, piece):
            count, here = min(piece, rows - begin), at + begin * width
            weight, bias, out, inputs = layer.out
            # Residual and output are both `hidden`: the projection adds in place.
            native.linear(mixed.data_ptr() + begin * across, 0, eps, 0, weight, bias, here, here, count, out, inputs)
            weight, bias, out, inputs = layer.gate_up
            native.linear(here, layer.mlp_norm, eps, 0, weight, bias, 0, both.data_ptr(), count, out, inputs)
            weight, bias, out, inputs = layer.down
            # gated = 1: the kernel reads gate and up side by side and applies silu(gate) * up to its input.
            native.linear(both.data_ptr(), 0, eps, 1, weight, bias, here, here, count, out, inputs)

    def head(self, hidden: Tensor) -> Tensor | None:
        """Return logits of hidden (R, hidden_size) in fp32, or None where the head is not held in panels."""
        if self._head is None:
            return None
        weight, bias, out, inputs = self._head
        logits = hidden.new_empty(hidden.shape[0], out)
        self._kernels.linear(
            hidden.data_ptr(), self._final_norm, self._config.rms_eps, 0, weight, bias, 0, logits.data_ptr(),
            hidden.shape[0], out, inputs,
        )  # fmt: skip
        return logits.float()


def compiled_layers(config: DecoderConfig, weights: DecoderWeights) -> CompiledLayers | None:
    """Return the fast path of a decoder, or None where its shapes or the processor do not allow one.

    Called once, at the decoder's construction.

    It needs weights in panels, no head norms (Qwen3), and a rotation of a multiple of 32 dimensions.
    """
    dtype = weights.layers[0].attention_norm.dtype
    native = linear_kernels(dtype)
    if native is None or config.qk_norm or config.rope.rotary_dim % 32:
        return None
    for layer in weights.layers:
        if any(part.panels is None for part in (layer.qkv, layer.out, layer.gate_up, layer.down)):
            return None
        if layer.attention_norm.dtype != dtype:
            return None
    return CompiledLayers(config, weights, native)


def _addresses(layer: LayerWeights) -> _LayerAddresses:
    return _LayerAddresses(
        layer.attention_norm.data_ptr(),
        _matrix(layer.qkv),
        _matrix(layer.out),
        layer.mlp_norm.data_ptr(),
        _matrix(layer.gate_up),
        _matrix(layer.down),
    )


def _matrix(linear: PackedLinear) -> _LinearAddress:
    assert linear.panels is not None
    bias = 0 if linear.bias is None else linear.bias.data_ptr()
    return _LinearAddress(linear.panels.data_ptr(), bias, linear.out_features, linear.in_features)


class TensorGroup(Protocol):
    """The ranks that share every layer of a stage. Called in the same order on all of them."""

    def sum_(self, x: Tensor) -> Tensor:
        """Overwrite x with its sum over the ranks and return it. The result has the same bits on each rank."""

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """Return the ranks' (R, widths[rank]) side by side on rank 0, and None on the others."""


class DecoderModel:
    """A decoder, or the part of one that this process holds (`shard`, summed over `group`).

    Layer 0 of the pool is the first layer held. All methods must run under `torch.inference_mode()`; `forward` enters
    it by itself. The attribute `config` has this rank's own heads and MLP width.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        backend: AttentionBackend | None = None,
        fingerprint: str = "",
        shard: ModelShard = WHOLE,
        group: TensorGroup | None = None,
    ) -> None:
        self.config = shard.local(config)
        self.shard = shard
        self.group = group
        self.vocabulary = shard.vocabulary(config)
        self._widths = [len(part) for part in shard.vocabularies(config)]
        self.weights = weights
        self.backend = backend or make_backend("cpu")
        self.fingerprint = fingerprint
        sample = weights.layers[0].attention_norm
        self.dtype, self.device = sample.dtype, sample.device
        self._compiled = compiled_layers(self.config, weights) if group is None else None
        self.rotary = RotaryEmbedding(config.rope, config.max_model_len, self.device)

    def make_pool(self, slots: int) -> KvPool:
        """Allocate a KV pool for the layers held here, in the decoder's dtype."""
        config = self.config
        held = len(self.weights.layers)
        return KvPool(held, config.kv_heads, slots, config.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan, logit_rows: Tensor | None) -> Tensor:
        """Run one iteration through the whole model.

        tokens, positions: (T,) int64; plan: this iteration's, from `backend.plan`; logit_rows: (R,) int64, the rows
        whose next token is wanted (None: all). Returns (R, vocab) fp32. Writes T tokens' keys and values to the pool.
        """
        hidden = self.embed(tokens)
        hidden = self.run_layers(hidden, self.rotary_table(positions), plan)
        logits = self.head(hidden if logit_rows is None else hidden.index_select(0, logit_rows))
        assert logits is not None, "logits are rank 0's"
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (T, hidden) of (T,) token ids."""
        assert self.weights.embedding is not None, "this stage holds no embedding"
        tokens = tokens.to(self.device)
        if self.group is None:
            return functional.embedding(tokens, self.weights.embedding)
        # The vocabulary is cut over the ranks: ids of other ranks give zeros here, and the sum over the ranks is exact.
        local = tokens - self.vocabulary.start
        foreign = (local < 0) | (local >= len(self.vocabulary))
        rows = functional.embedding(local.masked_fill(foreign, 0), self.weights.embedding)
        return self.group.sum_(rows.masked_fill_(foreign.unsqueeze(1), 0.0))

    def rotary_table(self, positions: Tensor) -> RotaryTable:
        """Return the rotation of (T,) positions. Called once an iteration, for all layers."""
        return self.rotary.table(positions.to(self.device), self.dtype)

    def run_layers(self, hidden: Tensor, rotary: RotaryTable, plan: AttentionPlan) -> Tensor:
        """Run the layers that are held. hidden (T, hidden_size) is overwritten."""
        for index in range(len(self.weights.layers)):
            self.run_layer(index, hidden, rotary, plan, self.backend)
        # CUDA launches are asynchronous: the executor's clock must not stop before the layers are computed.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return hidden

    def run_layer(
        self, index: int, hidden: Tensor, rotary: RotaryTable, plan: AttentionPlan, backend: AttentionBackend
    ) -> None:
        """Run one layer, attending by `backend`. hidden (T, hidden_size), contiguous, is overwritten."""
        if self._compiled is not None:
            self._compiled.layer(index, hidden, rotary, plan, backend)
        else:
            self._layer(index, self.weights.layers[index], hidden, rotary, plan, backend)

    def head(self, hidden: Tensor) -> Tensor | None:
        """Return fp32 logits (R, vocab) of rows (R, hidden) after the last layer; None on ranks of a group but 0."""
        weights = self.weights
        assert weights.head is not None, "this stage holds no head"
        assert weights.final_norm is not None, "this stage holds no final norm"
        # None where the head is not in panels; the general path then computes it.
        if self._compiled is not None:
            logits = self._compiled.head(hidden)
            if logits is not None:
                return logits
        logits = weights.head(norm(hidden, weights.final_norm, self.config)).float()
        return logits if self.group is None else self.group.gather(logits, self._widths)

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        rotary: RotaryTable,
        plan: AttentionPlan,
        backend: AttentionBackend,
    ) -> None:
        config = self.config
        stacked = heads(norm(hidden, layer.attention_norm, config), layer.qkv, layer, config.kv_heads, rotary, config)
        query, key, value = torch.split_with_sizes(stacked, (config.q_heads, config.kv_heads, config.kv_heads), 1)
        mixed = backend.run(index, query, key, value, plan)
        hidden.add_(self._summed(layer.out(mixed.view(hidden.shape[0], -1))))
        hidden.add_(self._summed(feed(norm(hidden, layer.mlp_norm, config), layer.gate_up, layer.down)))

    def _summed(self, partial: Tensor) -> Tensor:
        return partial if self.group is None else self.group.sum_(partial)
