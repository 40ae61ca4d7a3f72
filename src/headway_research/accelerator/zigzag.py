"""Cross-check of matrix products with zigzag-dse, an independent mapping and cost model (an optional dependency).

Run `python -m headway_research.accelerator.zigzag` after `pip install zigzag-dse six`; it prints a row a product and
fails when one is outside. The machine is described in zigzag's terms: three array dimensions (K on rows, N on columns,
M over arrays), a register for the stationary weight, output registers along the rows, one double-buffered on-chip
memory with ports wide enough not to bound anything, HBM. Memories must stand in order from the array outwards. Inputs,
weights and outputs all move over HBM, so products are compared without fusion. Seconds a product.

zigzag loads the first tiles before it computes, and stores the last ones after, whole operands where its loops keep
them resident; here only the first tiles of all arrays are waited for. So a product is compared with the range between
zigzag's latency without these ends and with them.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import ConfigError
from headway.perf.hardware import model
from headway_research.accelerator.machine import MachineModel, machine
from headway_research.accelerator.mapping import GemmShape, OpCost, search
from headway_research.accelerator.operators import OperatorSetting, gemms

TOLERANCE = 0.10
ROWS = (128, 640, 2048)


class GemmComparison(NamedTuple):
    """One product's times in both models, in microseconds."""

    name: str
    m: int
    n: int
    k: int
    ours_us: float
    zigzag_us: float
    inner_us: float
    """zigzag's time without first loads and last stores."""

    @property
    def difference(self) -> float:
        """Relative difference from zigzag's whole latency."""
        return self.ours_us / self.zigzag_us - 1.0

    @property
    def ok(self) -> bool:
        """Whether it is within `TOLERANCE` of zigzag's range."""
        return self.inner_us * (1 - TOLERANCE) <= self.ours_us <= self.zigzag_us * (1 + TOLERANCE)


def crosscheck(
    rows: tuple[int, ...] = ROWS, names: tuple[str, ...] = ("qkv", "out", "up", "down")
) -> list[GemmComparison]:
    """Compare Llama-3.1-8B's products on the TPUv6e-like machine. Raises ConfigError without zigzag-dse."""
    setting = OperatorSetting(model("llama-3.1-8b"), machine("tpuv6e"))
    wanted = [g for m in rows for g in gemms(setting, setting.model, m) if g.name in names]
    wanted = [g._replace(outputs=g.n) for g in wanted]  # zigzag folds no gate
    ours = search(wanted, setting.machine)
    return [_product(setting.machine, g, cost) for g, cost in zip(wanted, ours, strict=True)]


def _product(on: MachineModel, gemm: GemmShape, cost: OpCost) -> GemmComparison:
    ours_s = cost.seconds(on.bandwidth)
    whole_s, inner_s = zigzag_s(on, gemm)
    return GemmComparison(gemm.name, gemm.m, gemm.n, gemm.k, ours_s * 1e6, whole_s * 1e6, inner_s * 1e6)


def zigzag_s(on: MachineModel, gemm: GemmShape) -> tuple[float, float]:
    """Return zigzag's seconds for a product, (with, without) first loads and last stores.

    zigzag searches loop orders for the lowest latency."""
    import yaml

    try:
        api = import_module("zigzag.api")  # by name: it is no dependency
    except ModuleNotFoundError as error:
        raise ConfigError(f"the cross-check needs {error.name}: pip install zigzag-dse six") from None
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, data in (("workload", _workload(gemm)), ("hardware", _hardware(on)), ("mapping", _mapping(on, gemm))):
            files[name] = str(Path(folder) / f"{name}.yaml")
            Path(files[name]).write_text(yaml.safe_dump(data, sort_keys=False))
        found = api.get_hardware_performance_zigzag(
            workload=files["workload"],
            accelerator=files["hardware"],
            mapping=files["mapping"],
            opt="latency",
            dump_folder=folder,
            loma_show_progress_bar=False,
        )
    inner = float(found[2][0][0].latency_total0)
    return float(found[1]) / on.clock_hz, inner / on.clock_hz


def _workload(gemm: GemmShape) -> list[dict[str, Any]]:
    return [
        {
            "id": 0,
            "name": gemm.name,
            "operator_type": "Gemm",
            "equation": "O[b][k]+=I[b][c]*W[c][k]",
            "loop_dims": ["B", "K", "C"],
            "loop_sizes": [gemm.m, gemm.n, gemm.k],
            "operand_precision": {"I": 16, "W": 16, "O": 32, "O_final": 16},
            "operand_source": {"W": 0, "I": 0},
        }
    ]


def _mapping(on: MachineModel, gemm: GemmShape) -> list[dict[str, Any]]:
    links = {"O": "O", "W": "I2", "I": "I1"}
    spatial = {"D1": [f"C, {on.rows}"], "D2": [f"K, {on.columns}"], "D3": [f"B, {min(on.arrays, gemm.m)}"]}
    return [{"name": "default", "spatial_mapping": spatial, "memory_operand_links": links}]


def _port(name: str, kind: str, bits: int, uses: list[str]) -> dict[str, Any]:
    return {"name": name, "type": kind, "bandwidth_min": bits, "bandwidth_max": bits, "allocation": uses}


def _memory(
    size: int, operands: list[str], ports: list[dict[str, Any]], served: list[str], **more: Any
) -> dict[str, Any]:
    return {
        "size": size, "r_cost": 0, "w_cost": 0, "area": 0, "latency": 1, "operands": operands, "ports": ports,
        "served_dimensions": served, **more,
    }  # fmt: skip


def _hardware(on: MachineModel) -> dict[str, Any]:
    # Bits a cycle.
    hbm = max(1, round(on.bandwidth / on.clock_hz * 8))
    wide = 1 << 20
    every = ["I1, fh", "I1, tl", "I2, fh", "I2, tl", "O, fh", "O, tl", "O, fl", "O, th"]
    all_three = ["D1", "D2", "D3"]
    return {
        "name": on.name,
        "memories": {
            "weight": _memory(
                32, ["I2"], [_port("r_port_1", "read", 16, ["I2, tl"]), _port("w_port_1", "write", 16, ["I2, fh"])], []
            ),
            "sum": _memory(
                32,
                ["O"],
                [
                    _port("r_port_1", "read", 32, ["O, tl"]),
                    _port("r_port_2", "read", 32, ["O, th"]),
                    _port("w_port_1", "write", 32, ["O, fh"]),
                    _port("w_port_2", "write", 32, ["O, fl"]),
                ],
                ["D1"],
            ),
            "onchip": _memory(
                on.compute_bytes * 8,
                ["I1", "I2", "O"],
                [
                    _port("r_port_1", "read", wide, ["I1, tl"]),
                    _port("r_port_2", "read", wide, ["I2, tl"]),
                    _port("rw_port_1", "read_write", wide, ["O, tl", "O, fl"]),
                    _port("rw_port_2", "read_write", wide, ["I1, fh", "I2, fh", "O, fh", "O, th"]),
                ],
                all_three,
                force_double_buffering=True,
            ),
            "hbm": _memory(10**13, ["I1", "I2", "O"], [_port("rw_port_1", "read_write", hbm, every)], all_three),
        },
        "operational_array": {
            "input_precision": [16, 16],
            "unit_energy": 0,
            "unit_area": 1,
            "dimensions": all_three,
            "sizes": [on.rows, on.columns, on.arrays],
        },
    }


def main() -> int:
    """Print each product's times in both models; return 1 when one is outside zigzag's range."""
    products = crosscheck()
    for found in products:
        times = f"{found.ours_us:9.1f} µs here, {found.inner_us:.1f} to {found.zigzag_us:.1f} µs in zigzag"
        print(f"{found.name:5} {found.m:5} x {found.n:5} x {found.k:5} {times}{'' if found.ok else '  DIFFERS'}")
    return int(not all(found.ok for found in products))


if __name__ == "__main__":
    sys.exit(main())
