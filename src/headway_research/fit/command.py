"""`headway profile fit FILES… --out FILE`: fit operator profiles of an accelerator, for simulations of it.

Formats are told by their columns: Vidur's `mlp.csv` and network files, Frontier's `attention.csv`, AIConfigurator's
Parquet files (these need `pip install headway[fit]`). Folders are searched for such files.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.files import write_output

_ENDINGS = (".csv", ".csv.gz", ".parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="profiles, or folders of them")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the fit (JSON)")
    parser.add_argument("--device", help="the accelerator that was profiled, where the files do not say it")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="SHARE", help="error that thinning may cause (default: 0.01)"
    )


def run(arguments: argparse.Namespace) -> int:
    from headway.perf.hardware import accelerator
    from headway_research.fit.operators import encode, fit_device
    from headway_research.fit.readers import FAMILIES, read_all

    if not 0.0 <= arguments.tolerance < 0.2:
        raise ConfigError(f"--tolerance must be from 0 to 0.2, not {arguments.tolerance}")
    device = accelerator(arguments.device).name if arguments.device else None
    paths = _found(arguments.files)
    profiles = read_all(paths, device)
    # Devices that share kernels share a fit, whatever their names.
    dies = sorted({accelerator(p.device).kernels for p in profiles})
    if len(dies) > 1:
        raise ConfigError(f"these files are of {' and '.join(dies)}: fit one accelerator at a time")
    fit = fit_device(dies[0], profiles, [path.name for path in paths], arguments.tolerance)
    data = encode(fit)
    write_output(arguments.out, data)
    count = Counter(dict.fromkeys(FAMILIES, 0))
    for profile in profiles:
        count[profile.family] += len(profile)
    print(f"{dies[0]}: {len(paths)} files, {sum(count.values()):,} points")
    for family, points in count.items():
        print(f"  {family:<12} {points:>8,} points{'' if points else '  (not profiled: will be derived)'}")
    print(f"written to {arguments.out} ({len(data):,} bytes)")
    return 0


def _found(given: list[Path]) -> list[Path]:
    """Return the given files and the profiles inside given folders. Raises ConfigError where there are none."""
    paths: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.name.endswith(_ENDINGS))
            if not inside:
                raise ConfigError(f"{path} holds no {', '.join(_ENDINGS)} file")
            paths += inside
        elif path.exists():
            paths.append(path)
        else:
            raise ConfigError(f"there is no file {path}")
    return paths
