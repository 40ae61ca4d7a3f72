"""Loading of a model folder as a `DecoderModel`, or as one rank's part of it, from mapped safetensors files.

Afterwards each weight is resident once; a rank reads only its own slices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.core.files import open_input, read_json
from headway.runtime.attention.backend import AttentionBackend
from headway.runtime.model.config import WHOLE, DecoderConfig, ModelShard, read_config
from headway.runtime.model.decoder import DecoderModel, DecoderWeights, LayerWeights, PackedLinear, TensorGroup

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointReader:
    """The tensors of one folder. Files are mapped, so nothing is resident until it is copied out.

    Opening reads headers only. Raises CheckpointError when there are no safetensors (a pickle is never opened), when
    the index and the files disagree, or when a file is truncated or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._home: dict[str, str] = {}
        self._taken: set[str] = set()
        for file, listed in _listing(folder).items():
            handle = _open(folder / file)
            names = set(handle.keys())
            for name in listed if listed is not None else names:
                if name not in names:
                    raise CheckpointError(f"{folder / file}: tensor '{name}' is missing, though {_INDEX} lists it here")
                self._home[name] = file
            self._files[file] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def leave(self, prefix: str) -> None:
        """Exempt tensors whose names begin with `prefix` from `check_all_taken`: another rank takes them."""
        self._taken.update(name for name in self._home if name.startswith(prefix))

    def check_layers(self, count: int) -> None:
        """Raise CheckpointError where the tensors are of another number of layers."""
        found = {match[1] for name in self._home if (match := _LAYER.match(name))}
        if len(found) != count:
            raise CheckpointError(f"{self.folder}: config.json has {count} layers, and the tensors are of {len(found)}")

    def take(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the named tensor, or those rows or columns of it. The rest of the mapped file is not read.

        `shape` is that of the whole tensor. Raises CheckpointError when it is missing or of another shape.
        """
        if name not in self._home:
            raise CheckpointError(f"{self.folder}: tensor '{name}' of shape {list(shape)} is missing")
        file = self._home[name]
        piece = self._files[file].get_slice(name)
        found = tuple(piece.get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self.folder / file}: tensor '{name}' has shape {list(found)}, "
                f"expected {list(shape)} from config.json"
            )
        self._taken.add(name)
        tensor: Tensor
        if rows is not None and len(rows) != shape[0]:
            # A slice of rows is contiguous in the file; columns are strided, yet only they become resident.
            tensor = piece[rows.start : rows.stop]
        elif columns is not None and len(columns) != shape[1]:
            tensor = piece[:, columns.start : columns.stop]
        else:
            tensor = self._files[file].get_tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.folder / file}: tensor '{name}' has type {tensor.dtype}, expected a float type"
            )
        return tensor

    def check_all_taken(self, ignored: tuple[str, ...]) -> None:
        """Raise CheckpointError if tensors remain whose names do not end in one of `ignored`: not this architecture."""
        extra = sorted(name for name in self._home if name not in self._taken and not name.endswith(ignored))
        if extra:
            shown = ", ".join(f"'{name}' ({self._home[name]})" for name in extra[:4])
            raise CheckpointError(
                f"{self.folder}: {len(extra)} tensors that this architecture does not have: {shown}"
                + (", …" if len(extra) > 4 else "")
            )

    def fingerprint(self, config: dict[str, Any]) -> str:
        """Return 16 hex digits over the configuration and all names, shapes and types, not the bytes. Milliseconds."""
        shapes = []
        for name in sorted(self._home):
            piece = self._files[self._home[name]].get_slice(name)
            shapes.append([name, piece.get_shape(), str(piece.get_dtype())])
        text = json.dumps([config, shapes], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _listing(folder: Path) -> dict[str, list[str] | None]:
    """Return for each file name the tensors that the index lists in it, or None for all that it holds."""
    # As in transformers: an index beside the single file is a leftover.
    if (folder / _SINGLE).exists():
        return {_SINGLE: None}
    if (folder / _INDEX).exists():
        mapping = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
            raise CheckpointError(f"{folder / _INDEX}: 'weight_map' must map tensor names to files")
        files: dict[str, list[str] | None] = {}
        for name, file in mapping.items():
            # A path in the index must not lead out of the model's folder.
            if Path(file).name != file:
                raise CheckpointError(f"{folder / _INDEX}: '{file}' is not a file name in this folder")
            names = files.setdefault(file, [])
            assert names is not None
            names.append(name)
        return files
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if others:
        raise CheckpointError(
            f"{folder}: holds {', '.join(others[:3])} but no safetensors. Pickled weights can run code when opened and "
            "are refused; convert the model to safetensors"
        )
    raise CheckpointError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")


def _open(path: Path) -> Any:
    try:
        with open_input(path) as file:
            size = os.fstat(file.fileno()).st_size
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, though {_INDEX} lists it") from None
    except (OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{shortened(str(path))} cannot be read: {getattr(error, 'strerror', error)}") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: truncated or damaged safetensors file of {size} bytes ({str(error)[:300]})"
        ) from None


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_Part = tuple[str, int, range]
"""A tensor's name, its rows, and those of them that are wanted."""

_NEVER_READ = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def load_decoder(
    path: str | Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: str = "cpu",
    backend: AttentionBackend | None = None,
    shard: ModelShard = WHOLE,
    group: TensorGroup | None = None,
    loaded: Callable[[int, int], None] = lambda done, total: None,
) -> DecoderModel:
    """Load a decoder from config.json and safetensors (one file, or shards with an index).

    Called once a process, at start-up. shard: the part to hold. group: sums over the ranks that share its layers.
    loaded: called after each layer with the number of layers that are loaded, and of all to load.
    dtype: "float32", "bfloat16" or "auto": the checkpoint's own, where float16 becomes float32, which is exact. Peak
    memory is the weights plus one layer. Raises CheckpointError, naming file and tensor, for whatever does not fit, and
    ConfigError for a dtype or max_model_len that cannot work.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    data = read_json(folder / "config.json")
    config = read_config(data, max_model_len, str(folder / "config.json"))
    loader = _WeightLoader(config, CheckpointReader(folder), resolve_dtype(dtype, config), torch.device(device), shard)
    weights = loader.load(loaded)
    return DecoderModel(config, weights, backend, loader.checkpoint.fingerprint(data), shard, group)


def resolve_dtype(name: str, config: DecoderConfig) -> torch.dtype:
    """Return the type to compute in, from a setting and the checkpoint's own type."""
    return torch.float32 if config.dtype_for(name) == "float32" else torch.bfloat16


class _WeightLoader:
    """One load: the names and shapes that a family's checkpoint must have, and the slices that a shard takes."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        shard: ModelShard,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.shard = shard
        dim = config.head_dim
        q, kv = shard.q_heads(config), shard.kv_heads(config)
        self._q, self._kv = _scaled(q, dim), _scaled(kv, dim)
        self._q_rows, self._kv_rows = config.q_heads * dim, config.kv_heads * dim
        self._mlp = shard.mlp(config)

    def load(self, loaded: Callable[[int, int], None]) -> DecoderWeights:
        config, shard, checkpoint = self.config, self.shard, self.checkpoint
        own = shard.layers(config)
        checkpoint.check_layers(config.layers)
        for index in (index for index in range(config.layers) if index not in own):
            checkpoint.leave(f"model.layers.{index}.")
        layers = []
        for index in own:
            layers.append(self._layer(f"model.layers.{index}."))
            loaded(len(layers), len(own))
        vocabulary, hidden = config.vocab_size, config.hidden_size
        own_vocabulary = shard.vocabulary(config)
        # Some checkpoints of tied models store the head as well; it then takes precedence.
        tied = config.tie_embeddings and "lm_head.weight" not in checkpoint
        embedding = head = norm = None
        if shard.first:
            embedding = self._stacked([("model.embed_tokens.weight", vocabulary, own_vocabulary)], hidden)
        if shard.last:
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            head = PackedLinear(self._stacked([(name, vocabulary, own_vocabulary)], hidden))
            norm = self._plain("model.norm.weight", (hidden,))
        # With several stages no rank takes all three.
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            if shard.stages > 1:
                checkpoint.leave(name)
        checkpoint.check_all_taken(_NEVER_READ)
        return DecoderWeights(layers, embedding, norm, head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, mlp = config.hidden_size, config.mlp_size
        attention, feed = f"{prefix}self_attn.", f"{prefix}mlp."
        q_rows, kv_rows = self._q_rows, self._kv_rows
        qkv = [("q_proj", q_rows, self._q), ("k_proj", kv_rows, self._kv), ("v_proj", kv_rows, self._kv)]
        gate_up = [("gate_proj", mlp, self._mlp), ("up_proj", mlp, self._mlp)]
        # The fused tensor has q, k and v (gate and up) under each other: each part is a range of rows of the same
        # tensor.
        if config.fused_checkpoint:
            whole = q_rows + 2 * kv_rows
            parts = (self._q, _moved(self._kv, q_rows), _moved(self._kv, q_rows + kv_rows))
            qkv = [("qkv_proj", whole, part) for part in parts]
            gate_up = [("gate_up_proj", 2 * mlp, part) for part in (self._mlp, _moved(self._mlp, mlp))]
        head_norm = (config.head_dim,)
        return LayerWeights(
            attention_norm=self._plain(f"{prefix}input_layernorm.weight", (hidden,)),
            qkv=self._by_rows(attention, qkv, hidden, config.qkv_bias),
            out=self._by_columns(f"{attention}o_proj", (hidden, q_rows), self._q, config.out_bias),
            mlp_norm=self._plain(f"{prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=self._by_rows(feed, gate_up, hidden, config.mlp_bias),
            down=self._by_columns(f"{feed}down_proj", (hidden, mlp), self._mlp, config.mlp_bias),
            q_norm=self._plain(f"{attention}q_norm.weight", head_norm) if config.qk_norm else None,
            k_norm=self._plain(f"{attention}k_norm.weight", head_norm) if config.qk_norm else None,
        )

    def _by_rows(self, prefix: str, parts: list[_Part], inputs: int, biased: bool) -> PackedLinear:
        """Load a layer whose outputs are cut: this rank's rows of the named tensors, stacked."""
        weight = self._stacked([(f"{prefix}{name}.weight", rows, own) for name, rows, own in parts], inputs)
        bias = None
        if biased:
            bias = self._stacked([(f"{prefix}{name}.bias", rows, own) for name, rows, own in parts], None)
        return PackedLinear(weight, bias)

    def _by_columns(self, name: str, shape: tuple[int, int], own: range, biased: bool) -> PackedLinear:
        """Load a layer whose inputs are cut. The ranks' results are summed, so only rank 0 adds the bias."""
        mapped = self.checkpoint.take(f"{name}.weight", shape, columns=own)
        weight = torch.empty((shape[0], len(own)), dtype=self.dtype, device=self.device).copy_(mapped)
        if not biased or self.shard.rank:
            # Ranks other than 0 leave a bias that is there; without one the prefix matches nothing.
            self.checkpoint.leave(f"{name}.bias")
            return PackedLinear(weight)
        return PackedLinear(weight, self._plain(f"{name}.bias", shape[:1]))

    def _stacked(self, parts: list[_Part], inputs: int | None) -> Tensor:
        """Return rows of the named tensors stacked in one new tensor. inputs None: the tensors are vectors."""
        tail = () if inputs is None else (inputs,)
        # First, so that nothing is allocated for shapes that the files do not have.
        mapped = [self.checkpoint.take(name, (rows, *tail), rows=own) for name, rows, own in parts]
        fused = torch.empty((sum(len(own) for _, _, own in parts), *tail), dtype=self.dtype, device=self.device)
        for target, part in zip(torch.split(fused, [len(own) for _, _, own in parts]), mapped, strict=True):
            target.copy_(part)
        return fused

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        mapped = self.checkpoint.take(name, shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device).copy_(mapped)


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
