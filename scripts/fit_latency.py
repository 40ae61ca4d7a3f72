"""Make the shipped latency fits again from public operator profiles: `python scripts/fit_latency.py`.

Deterministic: the same profiles give the same bytes. Needs `pip install headway[fit]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headway.perf.latency.device_fit import DeviceFit
from headway.perf.latency.fitted import shipped_fit
from headway_research.fit.operators import borrow, encode, fit_device
from headway_research.fit.readers import OperatorProfile, read_all

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT.parent / "shared" / "data" / "profiles"
OUT = ROOT / "src" / "headway" / "perf" / "latency" / "data"

TOLERANCE = 0.03
"""What thinning may move a time by. Costs 0.4% of mean error on the measured points and halves the files."""

SOURCES = (
    "linear and elementwise operators, sends: microsoft/vidur 7d47513 (MIT)",
    "attention over a prefix: NetX-lab/Frontier a4b22df (MIT), A800/H800",
    "attention of prompts and decodes, other products, all-reduce: ai-dynamo/aiconfigurator 095f58a (Apache-2.0)",
)
AISIMULATE = ("attention of prompts and decodes, products, all-reduce: aisimulate 0.13.0 of vLLM 0.24.0 (Apache-2.0)",)
DIES = {
    "a100-80gb": SOURCES, "h100-80gb": SOURCES,
    "h200-141gb": AISIMULATE, "b200-180gb": AISIMULATE, "l40s-48gb": AISIMULATE,
}  # fmt: skip
DONOR = "h100-80gb"
"""What a newer die's profiles lack is this one's, scaled."""


def profile_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.name.endswith((".csv.gz", ".csv", ".parquet")))


def make(device: str, profiles: Sequence[OperatorProfile]) -> bytes:
    """One device's file."""
    return encode(_fit(device, profiles))


def _fit(device: str, profiles: Sequence[OperatorProfile]) -> DeviceFit:
    fit = fit_device(device, profiles, DIES[device], TOLERANCE)
    return fit if fit.elementwise is not None else borrow(fit, shipped_fit(DONOR))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of the profiles")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    arguments = parser.parse_args()
    profiles = read_all(profile_files(arguments.profiles))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for device in DIES:
        data = make(device, profiles)
        path = arguments.out / f"{device}.json"
        path.write_bytes(data)
        print(f"{path.name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
