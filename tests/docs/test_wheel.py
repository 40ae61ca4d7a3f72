"""A built wheel, installed into a fresh environment without this checkout, simulates and serves."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from scripts.compiled_modules import can_compile

from headway.core.native_build import find_compiler

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "src" / "headway", ROOT / "src" / "headway_research"]
PREBUILT = platform.machine() == "x86_64" and find_compiler() is not None

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.skipif(
        not any(importlib.metadata.distributions(name="build")), reason="the dev dependency `build` is not installed"
    ),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a source distribution holds, which is all that others build wheels from. Built from a copy, so that what
    earlier builds left behind in the checkout cannot get in."""
    folder = tmp_path_factory.mktemp("sources")
    copy = folder / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "scripts").mkdir()
    scripts = ("scripts/build_backend.py", "scripts/compiled_modules.py")
    for name in (*scripts, "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    build(copy, "sdist", folder / "dist")
    with tarfile.open(next((folder / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build(sources, "wheel", folder, HEADWAY_PREBUILT=str(int(PREBUILT)))
    (made,) = folder.glob("*.whl")
    return made


def build(source: Path, kind: str, out: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


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


def run(installed: Path, *words: str, cwd: Path, **changed: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changed
    outcome = subprocess.run(
        [str(installed / words[0]), *words[1:]], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def test_the_wheel_holds_every_file_of_both_packages(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path for package in PACKAGES for path in package.rglob("*")]
    names = [path.relative_to(ROOT / "src").as_posix() for path in files if path.is_file()]
    assert [name for name in names if "__pycache__" not in name and name not in held] == []
    assert "entry_points.txt" in {Path(name).name for name in held}


def test_the_installed_package_is_the_wheel_s_and_has_its_version(installed: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import headway; print(headway.__file__, headway.__version__)"
    file, version = run(installed, "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert f"headway-{version}-" in wheel.name
    assert run(installed, "headway", "--version", cwd=tmp_path).split() == ["headway", version]


def test_a_wheel_made_without_a_compiler_is_for_any_python(sources: Path, tmp_path: Path) -> None:
    said = build(sources, "wheel", tmp_path, PATH="")
    assert "Policies stay interpreted" in said
    assert next(tmp_path.glob("*.whl")).name.endswith("-py3-none-any.whl")


@pytest.mark.skipif(not can_compile(), reason="needs mypyc and a C compiler")
def test_the_installed_policies_are_compiled(installed: Path, tmp_path: Path) -> None:
    code = "import headway.policy.iteration.queue as q, headway.sim.engine as r; print(q.__file__, r.__file__)"
    loaded = run(installed, "python", "-c", code, cwd=tmp_path).split()
    assert all(file.endswith(".so") and Path(file).is_relative_to(installed.parent) for file in loaded)
    assert "compiled policies" in run(installed, "headway", "doctor", cwd=tmp_path)


def test_the_installed_command_simulates_its_own_examples(installed: Path, tmp_path: Path) -> None:
    run(installed, "headway", "examples", "--copy", cwd=tmp_path)
    here, copied = (
        {path.relative_to(root) for path in (root / "examples").rglob("*") if "__pycache__" not in path.parts}
        for root in (ROOT, tmp_path)
    )
    assert copied == here
    scenario = "examples/chat-and-documents.yaml"
    words = ("headway", "simulate", scenario, "--seeds", "0", "--set", "run.window_s=30", "--jobs", "1")
    assert "TTFT" in run(installed, *words, cwd=tmp_path)
    cluster = "examples/cluster-tetris.yaml"
    run(installed, "headway", "simulate", cluster, "--set", "workload.requests=20", "--jobs", "1", cwd=tmp_path)


@pytest.mark.skipif(not PREBUILT, reason="needs a C++ compiler on x86-64")
def test_the_wheel_s_compiled_libraries_are_loaded_without_a_compiler(
    installed: Path, wheel: Path, tmp_path: Path
) -> None:
    python = f"cp3{sys.version_info.minor}"
    of = f"{python}-{python}" if can_compile() else "py3-none"
    assert wheel.name.endswith(f"-{of}-linux_x86_64.whl")
    code = (
        "from headway.core import native_build as n\n"
        "import torch\n"
        "loaded = {name: n.compiled(library) for name, library in n.LIBRARIES.items()}\n"
        "print(n.find_compiler(), *(name for name, library in loaded.items() if library is not None))\n"
        "from headway.runtime.attention.native import kernels\n"
        "print((kernels() is not None) == torch.cpu._is_avx512_bf16_supported())"
    )
    environment = {"CXX": "none", "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = run(installed, "python", "-c", code, cwd=tmp_path, **environment)
    assert said.splitlines() == ["None kernels fp32-avx2 fp32-avx512 cdsp", "True"]
    assert not (tmp_path / "cache").exists()


def test_the_installed_command_loads_the_embedded_model(installed: Path, tmp_path: Path) -> None:
    said = run(installed, "headway", "serve", "--dry-run", "--threads", "1", "--max-model-len", "4096", cwd=tmp_path)
    assert "parameters" in said


def test_the_installed_api_generates_offline(installed: Path, tmp_path: Path) -> None:
    code = (
        "from headway import LLM, SamplingParams\n"
        "with LLM(max_model_len=1024, threads=1) as llm:\n"
        "    prompt = 'The passkey is 84213. Remember it.\\nThe passkey is'\n"
        "    print(llm.generate(prompt, SamplingParams(temperature=0))[0].text)"
    )
    assert run(installed, "python", "-c", code, cwd=tmp_path).strip() == "84213"
