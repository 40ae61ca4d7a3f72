"""Look up known vulnerabilities of every package in requirements/*.lock, with pip-audit.

Run: python scripts/audit.py (`make audit`). Exit status: 0 when all packages were looked up and none is vulnerable, 1
when one is, 75 when a package could not be looked up (no network, or none of the versions in PyPI's advisories).
pip-audit itself reports "no known vulnerabilities" then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UNAVAILABLE = 75
"""Exit status when some package's advisories cannot be had, as in `make_vllm_env.py`."""


def verdict(packages: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Return (exit status, lines to print) of pip-audit's list of packages."""
    found = [
        f"{each['name']} {each['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'no version'}"
        for each in packages
        for flaw in each.get("vulns", ())
    ]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    lines = [*found]
    if skipped:
        lines.append(f"not looked up: {len(skipped)} of {len(packages)} packages, {', '.join(skipped[:5])} ...")
    if not (found or skipped):
        lines.append(f"no known vulnerability in {len(packages)} packages")
    return (1 if found else UNAVAILABLE if skipped or not packages else 0), lines


def main() -> int:
    locks = [word for lock in sorted((ROOT / "requirements").glob("*.lock")) for word in ("-r", str(lock))]
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", *locks]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        # It reached no service at all: its last line says why.
        print("not looked up:", (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1])
        return UNAVAILABLE
    status, lines = verdict(json.loads(done.stdout)["dependencies"])
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
