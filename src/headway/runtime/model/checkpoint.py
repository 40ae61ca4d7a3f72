"""Reading a folder of safetensors: mapped, checked against what is expected, each tensor taken once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.model.fields import read_json

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
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    if (folder / _INDEX).is_file():
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
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, though {_INDEX} lists it")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or damaged safetensors file of {path.stat().st_size} bytes ({error})"
        ) from None
