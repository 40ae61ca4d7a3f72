"""Compile an operator fit of one device to a latency table for a model and a layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.core.files import read_input
from headway.perf.hardware import AcceleratorSpec, ModelShape, ParallelLayout, RankShape, accelerator, rank_shape
from headway.perf.latency.base import MAX_CHUNK
from headway.perf.latency.operators import (
    HEAD_DIM,
    LAYERS,
    CollectiveFit,
    Column,
    DecodeFit,
    ElementwiseFit,
    LinearFit,
    PrefillFit,
    base_ms,
    ring_all_reduce_ms,
)
from headway.perf.latency.table import DecodeTable, PastTable, TableSource

_T = TypeVar("_T")
SCHEMA = "headway.operators/3"
ATTENTION = ("vllm", "sglang", "frontier")
"""Kernel libraries in order of preference, where the attention of several was measured."""


class DeviceFit(msgspec.Struct, frozen=True, kw_only=True):
    """Fits of one die. A family without measurements is None, and `compile` derives it."""

    schema: str = SCHEMA
    device: str
    provenance: tuple[str, ...]
    linear: LinearFit | None
    elementwise: ElementwiseFit | None
    collectives: CollectiveFit | None
    prefill: PrefillFit | None
    decode: DecodeFit | None
    borrowed: tuple[str, ...] = ()
    """Families that are another die's, scaled to this one: `elementwise`, `prefill past` (`fit.operators.borrow`)."""


def preferred_source(sources: Sequence[str]) -> str:
    """Return the preferred source: vLLM's kernels, SGLang's, then FlashInfer's in Frontier's profile; ties by name."""
    return min(sources, key=lambda s: (next((i for i, a in enumerate(ATTENTION) if s.startswith(a)), 9), s))


def decode(data: bytes, where: str) -> DeviceFit:
    """Parse a file's content. Raises ConfigError that names `where` when it is not an operator fit."""
    try:
        fit = msgspec.json.decode(data, type=DeviceFit)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where} holds no operator fit ({error}): make one with `headway profile fit`") from error
    if fit.schema != SCHEMA:
        raise ConfigError(f"{where} has schema {fit.schema!r}, not {SCHEMA!r}: make one with `headway profile fit`")
    return fit


def load(path: Path) -> DeviceFit:
    """Read the file of an operator fit. Raises ConfigError when it cannot be read."""
    try:
        return decode(read_input(path), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the operator fit {path}: {error.strerror}") from error


# Times of a device without profiles, from those of a profiled die and both data sheets.
#
# Only what follows arithmetic or bandwidth is scaled. How long a kernel takes to start, or to walk over a history with
# a few tiles, hardly differs between devices of one generation, and is kept.

DERIVED_BANDS = {"linear": 0.32, "elementwise": 0.28, "prefill": 0.74, "decode": 0.74, "collectives": 0.40}
"""By operator family: nine of ten times derived for the A100 from the H100, for the H100 from the A100, and by either's
inverse, were within this share of the measured ones; attention's families have the worse of theirs
(`benchmarks.latency_bands`). Set by one derivation, this rule held 93% of products and elementwise operators, 99% of
prefills and 93% of decodes of the way back. Dies that did not set it, derived from the H100: B200's products 92%,
prefills 100%, decodes 82%; the L40S's, of another memory, 74%, 74%, 85%. Collectives: a ring by the link's data
sheet against vLLM's all-reduces under CUDA graphs; NCCL's alone, which start later, miss by up to 0.72."""


class DeviceScaling(msgspec.Struct, frozen=True):
    """Conversion of a profiled die's milliseconds to another device's."""

    source: AcceleratorSpec
    """The profiled die."""
    device: AcceleratorSpec

    @property
    def same(self) -> bool:
        """Whether there is nothing to convert."""
        return self.device.kernels == self.source.name and self.device.bandwidth == self.source.bandwidth

    @property
    def _compute(self) -> float:
        return self.source.flops / self.device.flops

    @property
    def _memory(self) -> float:
        return self.source.bandwidth / self.device.bandwidth

    def products_ms(self, ms: Column, rows: Column, k: int, n: int) -> Column:
        """Return the time of rows × k by k × n products: scaled by the ratio of the rooflines."""
        if self.same:
            return ms
        kk, nn = np.full(rows.size, float(k)), np.full(rows.size, float(n))
        return ms * base_ms(self.device, rows, kk, nn) / base_ms(self.source, rows, kk, nn)

    def elementwise_ms(self, ms: Column) -> Column:
        """Return the time of elementwise operators: scaled by bandwidth."""
        return ms * self._memory

    def prefill_ms(self, ms: Column, start_ms: Column | float = 0.0) -> Column:
        """Return the time of a chunk's attention: what exceeds `start_ms`, that of one row, scaled by arithmetic."""
        kept = np.minimum(start_ms, ms)
        return np.asarray(kept + (ms - kept) * self._compute, dtype=np.float64)

    def decode_ms(self, ms: Column, reading_ms: Column) -> Column:
        """Return the time of decode attention: of it, `reading_ms`, the time to read the KV, scaled by bandwidth."""
        return np.asarray(ms + np.minimum(reading_ms, ms) * (self._memory - 1.0), dtype=np.float64)


# Compile (model shape, device, layout, stage) and operator fits to one `TableSource`.
#
# The only place where milliseconds become seconds.
#
# Row term = layers × (matrix products, norms, rotary, activation, additions, KV writes, two all-reduces when tp > 1) +
# embedding on the first stage + final norm and LM head on the last + sending activations to the next stage + host time.
# Attention terms = layers × the fits. Operators without a profile are derived, as recorded in the source's `status` and
# `details`.
#
# The LM head computes one row a sequence, taken as min(rows, 128), below which it only reads its weights. A device
# without profiles takes the nearest profiled die's times, scaled (`derived`).


class EngineAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Costs that operator profiles do not contain."""

    host_s: float = 3e-4
    """Host seconds per iteration and stage (launch, scheduling); of the order that Medha's pipeline costs imply."""
    head_rows: int = 128
    """Most rows that the LM head computes."""
    kv_write: float = 0.3
    """Share of bandwidth that writing the KV cache reaches (Frontier's kernel-only H800 rows)."""
    kv_write_ms: float = 0.0024
    """Least milliseconds of a KV write (same source)."""
    send: bool = False
    """Count sending activations to the next stage in the row term. The simulator counts it itself, as a link."""
    engine: Literal["vllm", "headway"] = "vllm"
    """Engine whose library computes matrix products: `vllm`, or `headway` (PyTorch's, from layer profiles). They differ
    by 8 to 20%. A library without measurements is replaced by the fit's first one."""
    split_kv: Literal["never", "beyond", "always"] = "beyond"
    """When a chunk's attention over its history is spread over the whole device by kernels that split KV
    (`PrefillFit.split_ms`): never (the measured line continues, on which small chunks leave most of the device idle),
    beyond the measured prefixes, or always (as Medha describes its kernels)."""

    @property
    def products(self) -> str:
        """Beginning of the name of the engine's library of matrix products."""
        return "vllm" if self.engine == "vllm" else LAYERS


ROWS = tuple(
    sorted(
        {
            1,
            2,
            4,
            *range(8, 1025, 8),
            *range(1040, 4097, 16),
            *range(4224, 16385, 128),
            *range(16640, 2 * MAX_CHUNK + 1, 256),
        }
        | {edge + 1 for edge in range(64, 2049, 64)}
        | {edge + 1 for edge in range(2176, 4097, 128)}
    )
)
"""Row counts at which the row term is evaluated: every tile's edge up to 4096, and the row after it."""

CHUNKS = tuple(
    sorted(
        {1, 2, 4, 8, *range(16, 128, 16), *(round(128 * 2 ** (i / 8)) for i in range(57))}
        | {edge + more for edge in range(64, 1025, 64) for more in (0, 1)}
    )
)
"""Chunks at which attention is evaluated: tiles' edges, and eight an octave: lines follow the square within 0.2%."""

# Grid of decode attention: requests × cached tokens each.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PAST = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def compile_stage(
    name: str,
    shape: ModelShape,
    device: AcceleratorSpec,
    layout: ParallelLayout,
    stage: int,
    fit: DeviceFit,
    assumptions: EngineAssumptions | None = None,
) -> TableSource:
    """Compile the latency table of one pipeline stage. Raises ConfigError when the layout does not divide the model."""
    assumptions = assumptions or EngineAssumptions()
    part = rank_shape(shape, layout, stage)
    rows = np.array(ROWS, dtype=np.float64)
    work = _StageCompiler(fit, device, part, layout, assumptions)
    seconds = work.rows_ms(rows) * 1e-3 + assumptions.host_s
    own, offset, slope, split = work.chunks_ms(np.array(CHUNKS, dtype=np.float64))
    decode, per_token = work.decode_ms()
    tokens = ((0, assumptions.host_s), *((r, round(float(s), 9)) for r, s in zip(ROWS, seconds, strict=True)))
    # Cached tokens up to which the measured slope holds; "always" applies the split-KV slope from the first on.
    knee = fit.prefill.past if fit.prefill and assumptions.split_kv != "always" else 0
    beyond = tuple(
        (c, round(float(o), 9), round(float(b), 14))
        for c, o, b in zip(CHUNKS, offset * 1e-3, split * 1e-3, strict=True)
    )
    chunks = tuple(
        (c, round(float(a), 9), round(float(b), 14)) for c, a, b in zip(CHUNKS, own * 1e-3, slope * 1e-3, strict=True)
    )
    grid = DecodeTable(
        COUNTS, PAST, tuple(tuple(round(float(v), 9) for v in row) for row in decode * 1e-3), per_token * 1e-3
    )
    # The worst family decides: one derived family makes the table derived.
    derived = any(value.startswith("derived") for value in work.notes.values())
    direct = not derived and all(value.startswith("measured") for value in work.notes.values())
    return TableSource(
        fingerprint=f"{name}|{device.name}|{layout.name}|stage {stage}",
        provenance="; ".join(fit.provenance) or f"fit of {fit.device}",
        tokens=tokens,
        chunks=((0, 0.0, 0.0), *chunks),
        decode=(0.0, 0.0, 0.0),
        decode_grid=grid,
        further=work.further(),
        past=PastTable(knee, ((0, 0.0, 0.0), *beyond)),
        validated_past=fit.prefill.past if fit.prefill else 0,
        status="derived" if derived else "measured" if direct else "fitted",
        details={
            "families": dict(work.notes),
            "assumptions": msgspec.to_builtins(assumptions),
            "collective_share": work.collective_share,
            "validated": _validated(fit),
        },
    )


def _validated(fit: DeviceFit) -> dict[str, int]:
    """Return the largest tokens and requests that the fit was measured at, by operator family; 0: no measurement."""
    grids = [grid for sizes in fit.decode.grids.values() for grid in sizes.values()] if fit.decode else []
    return {
        "rows": fit.linear.top if fit.linear else 0,
        "chunk": fit.prefill.chunk if fit.prefill else 0,
        "chunk_past": fit.prefill.past if fit.prefill else 0,
        "decode_past": max((max(grid.past) for grid in grids), default=0),
        "decode_batch": max((max(grid.counts) for grid in grids), default=0),
    }


class _StageCompiler:
    """Sums operator times over one stage. `notes` records the origin of the times by operator family."""

    def __init__(
        self,
        fit: DeviceFit,
        device: AcceleratorSpec,
        part: RankShape,
        layout: ParallelLayout,
        assumptions: EngineAssumptions,
    ) -> None:
        self.fit, self.device, self.part, self.layout, self.assumptions = fit, device, part, layout, assumptions
        self.source = accelerator(fit.device)
        self.scaling = DeviceScaling(self.source, device)
        self.notes: dict[str, str] = {}
        self.collective_share = 0.0
        """Largest share of all-reduces in a row count's time, set by `rows_ms`."""

    def _note(self, family: str, text: str) -> None:
        # Collectives depend on links, not on the die: their notes say themselves whether they are scaled.
        if not self.scaling.same and family != "collectives":
            band = DERIVED_BANDS[family.split()[0]]
            text = f"derived: {self.fit.device} scaled to {self.device.name}, within {band:.0%} ({text})"
        elif family in self.fit.borrowed:
            text = f"derived: another die's, scaled to {self.device.name}"
        self.notes[family] = text

    def rows_ms(self, rows: Column) -> Column:
        """Return the stage's milliseconds that depend on the row count only, without the host's."""
        part, assumptions = self.part, self.assumptions
        products = [self._product(rows, *shape) for shape in (part.qkv, part.out, part.up, part.down)]
        layer: Column = np.sum(products, axis=0)
        layer += self._elementwise(rows)
        layer += self._kv_write(rows)
        # After attention's output product and after the MLP's down product.
        reduces = 2 * self._all_reduce(rows) if self.layout.tp > 1 else np.zeros(rows.size)
        layer += reduces
        total: Column = part.layers * layer
        if part.first:
            total += self._one_elementwise("emb", rows, part.hidden)
        if part.last:
            total += self._product(np.minimum(rows, assumptions.head_rows), *part.head)
            total += self._one_elementwise("input_layernorm", np.minimum(rows, assumptions.head_rows), part.hidden)
        elif assumptions.send:
            total += self._send(rows)
        self._note_linear()
        self.collective_share = round(float(np.max(part.layers * reduces / total)), 3)
        return total

    def further(self) -> tuple[tuple[int, float], ...]:
        """Return `TableSource.further`: empty where batches were not measured."""
        batched = self.fit.prefill.batched if self.fit.prefill else None
        if batched is None:
            return ()
        shares = batched.shares(np.array(CHUNKS, dtype=np.float64), self.part.q_heads)
        return tuple((c, round(float(share), 4)) for c, share in zip(CHUNKS, shares, strict=True))

    def chunks_ms(self, chunks: Column) -> tuple[Column, Column, Column, Column]:
        """Return a chunk's attention milliseconds over the stage's layers, as four columns by chunk size.

        (within itself, added by any prefix, per cached token, per cached token beyond the measured prefixes)."""
        heads, layers = (self.part.q_heads, self.part.kv_heads), self.part.layers
        fit = self.fit.prefill
        if fit is None:
            self._note("prefill", "derived: half of peak arithmetic, 0.02 ms a layer")
            # Milliseconds of one pair of query and key at half of peak; chunks below 16 rows fill a tile of 16.
            flops = self.device.flops * 0.5
            per = 1e3 * self.part.pair_flops / flops
            slope = layers * per * np.maximum(chunks, 16)
            return layers * (0.02 + per * chunks * (chunks + 1) / 2), np.zeros(chunks.size), slope, slope
        source = preferred_source(list(fit.own))
        key = f"{heads[0]}/{heads[1]}"
        own = fit.own_ms(chunks, heads, source)
        slope = fit.slope_ms(chunks, heads, source)
        split = slope
        if self.assumptions.split_kv != "never":
            reads = self.fit.decode
            speed = reads.speed(preferred_source(list(reads.grids))) if reads else 0.8 * self.source.bandwidth
            split = fit.split_ms(chunks, heads, speed)
        if self.assumptions.engine == "vllm" and key not in fit.over.get(source, {}):
            # Another library measured histories: a row attends to a cached token no slower than to its own chunk.
            within = 2.0 * own / chunks
            slope, split = np.minimum(slope, within), np.minimum(split, within)
        # Fits hold for a head dimension of HEAD_DIM; attention's work is linear in it.
        wide = self.part.head_dim / HEAD_DIM
        exact = key in fit.own[source] and wide == 1
        text = f"{source}, heads {key}" if exact else f"{source}, nearest head counts"
        self._note("prefill", f"{'measured' if exact else 'fitted'}: {text}")
        beyond = "the same line" if self.assumptions.split_kv == "never" else "split KV"
        same = key in fit.over.get(source, {})
        self._note(
            "prefill past",
            f"{'measured' if same else 'fitted'}: chunks over a prefix of up to {fit.past:,}, beyond that {beyond}",
        )
        start = fit.own_ms(np.ones(1), heads, source)
        parts = (own, start), (fit.prefix_ms(chunks, heads, source), 0.0), (slope, 0.0), (split, 0.0)
        own, offset, slope, split = (layers * wide * self.scaling.prefill_ms(*part) for part in parts)
        return own, offset, slope, split

    def decode_ms(self) -> tuple[Column, float]:
        """Return (milliseconds over COUNTS × PAST, milliseconds per KV token beyond it) over the stage's layers."""
        heads, layers = (self.part.q_heads, self.part.kv_heads), self.part.layers
        count, past = (g.ravel().astype(np.float64) for g in np.meshgrid(COUNTS, PAST, indexing="ij"))
        fit = self.fit.decode
        per_token = 1e3 * self.part.layer_kv_bytes / self.device.bandwidth
        if fit is None:
            self._note("decode", "derived: 0.8 of peak bandwidth, 0.01 ms a layer")
            grid = 0.01 + count * past * per_token / 0.8
            return layers * grid.reshape(len(COUNTS), len(PAST)), layers * per_token / 0.8
        source = preferred_source(list(fit.grids))
        key = f"{heads[0]}/{heads[1]}"
        wide = self.part.head_dim / fit.head_dim
        exact = key in fit.grids[source] and wide == 1
        self._note("decode", f"{'measured' if exact else 'fitted'}: {source}, {'heads ' + key if exact else 'nearest'}")
        grid = fit.ms(count, past, heads, source)
        reading = 4e3 * count * past * heads[1] * fit.head_dim / fit.speed(source)
        grid = wide * self.scaling.decode_ms(grid, reading)
        # Suffix minima over past: reading more is never faster, so a time above that of a longer history is noise.
        table = np.minimum.accumulate(grid.reshape(len(COUNTS), len(PAST))[:, ::-1], axis=1)[:, ::-1]
        return layers * table, layers * per_token / fit.tails[source]

    def _product(self, rows: Column, k: int, n: int) -> Column:
        fit = self.fit.linear
        if fit is None:
            return base_ms(self.device, rows, np.full(rows.size, float(k)), np.full(rows.size, float(n)))
        return self.scaling.products_ms(fit.ms(rows, k, n, self.assumptions.products), rows, k, n)

    def _note_linear(self) -> None:
        fit = self.fit.linear
        if fit is None:
            self._note("linear", "derived: roofline")
            return
        shapes = (self.part.qkv, self.part.out, self.part.up, self.part.down)
        library = fit.library(self.assumptions.products)
        missing = [f"{k}x{n}" for k, n in shapes if library != LAYERS or not fit.knows(k, n)]
        if missing:
            others = "; the others measured" if len(missing) < len(set(shapes)) else ""
            self._note("linear", f"fitted: roofline × residual of {library} for {', '.join(missing)}{others}")
        else:
            self._note("linear", "measured: tables of these very shapes")

    def _elementwise(self, rows: Column) -> Column:
        p = self.part
        widths = {
            "input_layernorm": p.hidden,
            "post_attention_layernorm": p.hidden,
            "attn_rope": p.rotary_width,
        }
        # One norm feeds both attention and MLP.
        if p.parallel_block:
            del widths["post_attention_layernorm"]
        time = np.sum([self._one_elementwise(op, rows, width) for op, width in widths.items()], axis=0)
        # Measured with a gate: two reads and a write an element; without one, a read and a write.
        time = time + self._one_elementwise("mlp_act", rows, p.mlp) * (1.0 if p.mlp_matrices == 3 else 2 / 3)
        return np.asarray(time + 2 * self._one_elementwise("add", rows, p.hidden), dtype=np.float64)

    def _one_elementwise(self, op: str, rows: Column, width: int) -> Column:
        fit = self.fit.elementwise
        if fit is None or op not in fit.curves:
            self._note("elementwise", "derived: three passes over the rows at 0.7 of peak bandwidth")
            # 3 µs of launch; three passes (two reads, a write) of 2 bytes an element, in milliseconds.
            return np.asarray(0.003 + 6e3 * rows * width / (0.7 * self.device.bandwidth), dtype=np.float64)
        exact = str(width) in fit.curves[op]
        if "elementwise" not in self.notes or not exact:
            self._note("elementwise", "measured: these widths" if exact else "fitted: widths between measured ones")
        return self.scaling.elementwise_ms(fit.ms(op, rows, width))

    def _kv_write(self, rows: Column) -> Column:
        moved = 2.0 * rows * self.part.layer_kv_bytes  # read from the product's output, written to the cache
        return np.asarray(
            np.maximum(self.assumptions.kv_write_ms, 1e3 * moved / (self.assumptions.kv_write * self.device.bandwidth)),
            dtype=np.float64,
        )

    def _all_reduce(self, rows: Column) -> Column:
        sent = rows * self.part.hidden * self.part.dtype_bytes
        tp = self.layout.tp
        fit = self.fit.collectives
        link = self.layout.inside_link(self.device)
        source = fit.source("all_reduce", tp) if fit is not None else None
        if self.layout.inside is None and fit is not None and source is not None:
            time = fit.ms("all_reduce", sent, tp, source=source)
            # A slower link stretches what grows with bytes; the first size's time is latency.
            slower = self.source.inside.bytes_per_s / link.bytes_per_s
            if slower != 1.0:
                self.notes["collectives"] = f"derived: {source}, {self.fit.device}'s scaled to {link.name}"
                return np.asarray(time[0] + np.maximum(time - time[0], 0.0) * slower, dtype=np.float64)
            self.notes["collectives"] = f"measured: {source}, {self.source.inside.name}, {tp} ranks"
            return time
        self.notes["collectives"] = f"derived: ring over {link.name}"
        return ring_all_reduce_ms(link, sent, tp)

    def _send(self, rows: Column) -> Column:
        """Return the milliseconds to send activations to the next stage; each rank sends a copy over its own link."""
        link = self.layout.stage_link(self.device)
        self.notes["send"] = f"fitted: {link.name}'s bandwidth and latency"
        sent = rows * self.part.hidden * self.part.dtype_bytes
        return np.asarray(1e3 * (link.latency_s + sent / (link.bytes_per_s * link.efficiency)), dtype=np.float64)
