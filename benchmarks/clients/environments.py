"""Environments of the clients, one for each: their requirements exclude each other.

    python -m benchmarks.clients.environments --lock       resolve them anew, into requirements/clients/

`make clients` makes them under .venv-clients from the locks. Prometheus is Debian's package, unpacked, not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements" / "clients"
FOLDER = ROOT / ".venv-clients"
REQUIREMENTS = {
    "openai": ("openai",),
    "langchain": ("langchain-openai",),
    "litellm": ("litellm",),
    # GuideLLM only counts tokens: the version of torch that the server has, for CPUs where there is such a wheel.
    "guidellm": ("guidellm", "torch==2.13.*"),
    "aiperf": ("aiperf",),
    "lm-eval": ("lm-eval[api]", "transformers"),
}
"""What is installed in each environment, but Prometheus's."""
PROMETHEUS = "prometheus"
VLLM = "vllm"
VLLM_FOLDER = ROOT / ".venv-vllm"


class UnavailableError(Exception):
    """An environment that cannot be had here; the message says why, in one line."""


def python_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the interpreter of an environment, made where it is missing or its lock has changed."""
    if name == VLLM:
        python = VLLM_FOLDER / "bin" / "python"
        if not python.exists():
            raise UnavailableError("its environment is not there: `make vllm` makes it (3.4 GB)")
        return python
    environment = folder / name
    python = environment / "bin" / "python"
    lock = b"prometheus" if name == PROMETHEUS else (LOCKS / f"{name}.lock").read_bytes()
    digest = hashlib.sha256(lock).hexdigest()
    stamp = environment / ".installed"
    if not (stamp.is_file() and stamp.read_text() == digest):
        print(f"making {environment}", flush=True)
        venv.create(environment, with_pip=True, clear=True)
        if name == PROMETHEUS:
            _unpack_prometheus(environment)
        else:
            _pip(python, "install", "--requirement", str(LOCKS / f"{name}.lock"))
        stamp.write_text(digest)
    return python


def versions(name: str, folder: Path = FOLDER) -> str:
    """Return name and version of what an environment is for."""
    python = python_of(name, folder)
    if name == PROMETHEUS:
        said = _output(str(python.with_name("prometheus")), "--version").split()
        return f"prometheus {said[2]}"
    package = "vllm" if name == VLLM else REQUIREMENTS[name][0].partition("[")[0]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return f"{package} {_output(str(python), '-c', code).strip()}"


def _unpack_prometheus(environment: Path) -> None:
    """Put Debian's prometheus and promtool beside the interpreter, without installing a service."""
    try:
        subprocess.run(["apt-get", "download", "prometheus"], cwd=environment, check=True, capture_output=True)
        (package,) = environment.glob("prometheus_*.deb")
        subprocess.run(["dpkg", "-x", package, environment / "package"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise UnavailableError(
            f"no Debian package of it here ({type(error).__name__}); `apt-get update` first"
        ) from None
    package.unlink()
    for tool in ("prometheus", "promtool"):
        (environment / "package" / "usr" / "bin" / tool).rename(environment / "bin" / tool)


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"pip cannot install it: {(errors or ['no reason given'])[-1][:200]}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Resolve the requirements of the clients, and write their locks.")
    parser.add_argument("--lock", action="store_true", required=True, help="write requirements/clients/*.lock")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the environments (default: .venv-clients)")
    parser.add_argument("names", nargs="*", choices=[*REQUIREMENTS, []], help="environments (default: all)")
    a = parser.parse_args()
    LOCKS.mkdir(parents=True, exist_ok=True)
    for name in a.names or REQUIREMENTS:
        environment = a.folder / name
        venv.create(environment, with_pip=True, clear=True)
        _pip(environment / "bin" / "python", "install", *REQUIREMENTS[name])
        write_lock(name, environment)
    return 0


def write_lock(name: str, environment: Path) -> None:
    """Write what an environment holds, and mark it as made from that."""
    frozen = _output(str(environment / "bin" / "python"), "-m", "pip", "freeze").splitlines()
    # Without the local label: +cpu is a build of the version, not another version.
    pins = sorted(
        f"{canonicalize_name(package)}=={version.partition('+')[0]}"
        for package, _, version in (line.partition("==") for line in frozen)
    )
    text = (
        f"# Made by benchmarks/clients/environments.py from {', '.join(REQUIREMENTS[name])}.\n" + "\n".join(pins) + "\n"
    )
    (LOCKS / f"{name}.lock").write_text(text)
    (environment / ".installed").write_text(hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    sys.exit(main())
