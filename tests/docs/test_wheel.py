"""A built wheel, installed into a fresh environment without this checkout, simulates and serves."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headway"

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.skipif(
        not any(importlib.metadata.distributions(name="build")), reason="the dev dependency `build` is not installed"
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that what earlier builds left behind in the checkout cannot get in."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment with the wheel, which takes its dependencies from this one's site-packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Plain path lines: .pth files of those folders, such as an editable install's, are not followed.
    shared = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(shared) + "\n")
    return folder / "bin"


def run(installed: Path, *words: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outcome = subprocess.run(
        [str(installed / words[0]), *words[1:]], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def test_the_wheel_holds_every_file_of_the_package(wheel: Path):
    held = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert [name for path in files if (name := path.relative_to(SOURCE.parent).as_posix()) not in held] == []
    assert "entry_points.txt" in {Path(name).name for name in held}


def test_the_installed_package_is_the_wheel_s_and_has_its_version(installed: Path, wheel: Path, tmp_path: Path):
    code = "import headway; print(headway.__file__, headway.__version__)"
    file, version = run(installed, "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert f"headway-{version}-" in wheel.name
    assert run(installed, "headway", "--version", cwd=tmp_path).split() == ["headway", version]


def test_the_installed_command_simulates(installed: Path, tmp_path: Path):
    scenario = str(ROOT / "examples" / "chat-and-documents.yaml")
    words = ("headway", "simulate", scenario, "--seeds", "0", "--set", "run.window_s=30", "--jobs", "1")
    assert "TTFT" in run(installed, *words, cwd=tmp_path)
    cluster = str(ROOT / "examples" / "cluster-tetris.yaml")
    run(installed, "headway", "simulate", cluster, "--set", "workload.requests=20", "--jobs", "1", cwd=tmp_path)


def test_the_installed_command_loads_the_embedded_model(installed: Path, tmp_path: Path):
    said = run(installed, "headway", "serve", "--dry-run", "--threads", "1", "--max-model-len", "4096", cwd=tmp_path)
    assert "parameters" in said


def test_the_installed_api_generates_offline(installed: Path, tmp_path: Path):
    code = (
        "from headway import LLM, SamplingParams\n"
        "with LLM(max_model_len=1024, threads=1) as llm:\n"
        "    prompt = 'The passkey is 84213. Remember it.\\nThe passkey is'\n"
        "    print(llm.generate(prompt, SamplingParams(temperature=0))[0].text)"
    )
    assert run(installed, "python", "-c", code, cwd=tmp_path).strip() == "84213"
