"""The files of deploy/ agree with each other and with the command line. No engine for containers is needed."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.compiled_modules import can_compile

from headway.cli.command_parser import CommandParser
from headway.core.settings import add_options
from headway.serving.load.convoy import ServerProcess
from headway.serving.serve_settings import ServeSettings
from headway.vllm.plugin import KNOWN

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def instructions(name: str = "Containerfile") -> list[tuple[str, str]]:
    """Return (instruction, its words) of a container file, comments left out and continued lines joined."""
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, words) for name, _, words in (line.partition(" ") for line in joined.splitlines() if line)]


def compose() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return data


def pinned(image: str) -> bool:
    """Return whether an image has a tag, and not one that moves to each release."""
    _, colon, tag = image.partition(":")
    return bool(colon) and tag != "latest"


def test_container_file_has_stages_with_pinned_bases_and_copies_what_exists() -> None:
    found = instructions()
    bases = [words for name, words in found if name == "FROM"]
    assert len(bases) == 2
    assert all(pinned(base.split()[0]) for base in bases)
    for words in (words for name, words in found if name == "COPY"):
        source = words.split()[:-1]
        if source[0].startswith("--from="):
            assert f"AS {source[0].removeprefix('--from=')}" in bases[0]
            continue
        assert all((ROOT / each).exists() for each in source), words


def test_container_runs_as_a_user_with_a_health_check_and_words_that_serve_takes() -> None:
    found = instructions()
    last = dict(found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :])
    assert last["USER"].split(":")[0] not in ("0", "root")
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert command[:2] == ["headway", "serve"]
    serve_flags(command[2:])
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "health check", "exec")
    assert f":{last['EXPOSE']}/health" in check[2]


def test_each_installation_in_the_container_file_is_pinned_or_cleaned_up() -> None:
    for words in (words for name, words in instructions() if name == "RUN"):
        subprocess.run(["sh", "-n", "-c", words], check=True)
        if "apt-get install" in words:
            assert "--no-install-recommends" in words
            assert "rm -rf /var/lib/apt/lists/*" in words
        if "pip install" in words and "venv" not in words:
            assert "-c requirements/serve.lock" in words


@pytest.mark.long
@pytest.mark.timeout(900)
def test_steps_of_the_container_file_make_a_server_in_an_empty_folder(tmp_path: Path) -> None:
    """All but those of packages and users of the system, which need an image of their own."""
    root, source = tmp_path / "root", tmp_path / "source"
    folder = root / "opt/headway"
    source.mkdir()
    of_the_machine = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment, skipped = of_the_machine | of_pip | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}, 0
    for name, words in instructions():
        if name == "ENV" and not words.startswith("PATH"):
            environment |= dict(one.split("=") for one in words.split())
        elif name == "COPY" and not words.startswith("--from"):
            *froms, to = words.split()
            for each in froms:
                copy_tracked(each, source / to / (Path(each).name if to == "." or to == "./" else ""))
        elif name == "RUN" and ("apt-get" in words or "groupadd" in words):
            skipped += 1
        elif name == "RUN":
            step = words.replace("/opt/headway", str(folder))
            done = subprocess.run(["sh", "-e", "-c", step], cwd=source, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert skipped == 2
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    assert size < 1.5e9
    bare = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "CC": "none", "CXX": "none"}
    done = subprocess.run([f"{folder}/bin/headway", "doctor"], env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled policies" in done.stdout or not can_compile()
    assert re.search(r"compiled kernels +on", done.stdout) or "avx2" not in Path("/proc/cpuinfo").read_text()
    with ServerProcess([], command=[f"{folder}/bin/headway", "serve"], environment=bare) as server:
        models = json.load(urllib.request.urlopen(f"{server.url}/v1/models"))
    assert models["data"][0]["id"] == "headway-embedded"


def copy_tracked(name: str, to: Path) -> None:
    """Copy a file or folder of the checkout as an image's build would get it: what is tracked."""
    found = subprocess.run(["git", "ls-files", name], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for each in found.splitlines():
        place = to if each == name else to / Path(each).relative_to(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / each, place)


def test_compose_mounts_files_that_exist_and_opens_ports_on_loopback_only() -> None:
    for service in compose()["services"].values():
        assert pinned(service["image"]) if "image" in service else (DEPLOY / service["build"]["context"]).is_dir()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for source in (volume.split(":")[0] for volume in service["volumes"]):
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    headway = compose()["services"]["headway"]
    assert (DEPLOY / headway["build"]["context"] / headway["build"]["dockerfile"]).name == "Containerfile.vllm"
    model = headway["command"][0]
    assert any(model.startswith(f"{volume.split(':')[-2]}/") for volume in headway["volumes"])


def test_the_image_of_vllm_has_a_version_that_the_plugin_knows_and_the_flag() -> None:
    steps = dict(instructions("Containerfile.vllm"))
    image, _, version = steps["FROM"].partition(":v")
    assert image == "vllm/vllm-openai"
    assert version in KNOWN
    assert "--no-deps" in steps["RUN"], "nothing in vLLM's environment changes"
    command = json.loads(steps["ENTRYPOINT"])
    assert command[:2] == ["vllm", "serve"]
    module, _, name = command[command.index("--scheduler-cls") + 1].rpartition(".")
    assert name in importlib.import_module(module).__all__


def test_prometheus_scrapes_the_server_and_grafana_finds_data_and_dashboard() -> None:
    services = compose()["services"]
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["headway:8000"]
    assert services["prometheus"]["volumes"][0].startswith("./prometheus/prometheus.yml:")
    provisioning = DEPLOY / "grafana/provisioning"
    source = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((provisioning / "dashboards/headway.yaml").read_text())["providers"][0]
    mounts = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    folder = DEPLOY / mounts[provider["options"]["path"]]
    boards = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert boards
    assert all(variable["type"] != "datasource" or variable["query"] == source["type"]
               for board in boards for variable in board["templating"]["list"])  # fmt: skip


def unit() -> dict[str, str]:
    lines = (DEPLOY / "headway.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_unit_starts_what_serve_takes_and_waits_longer_than_a_drain() -> None:
    command = shlex.split(unit()["ExecStart"])
    assert command[1] == "serve"
    serve_flags(command[2:])
    drain_s = ServeSettings().drain_timeout_s  # type: ignore[call-arg]
    assert drain_s is not None
    assert float(unit()["TimeoutStopSec"]) > drain_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    path = tmp_path / "headway.service"
    # the unit's own program is not installed here
    path.write_text((DEPLOY / "headway.service").read_text().replace("/opt/headway/bin/headway", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert "headway.service" not in done.stderr, done.stderr


def serve_flags(words: list[str]) -> None:
    """Raise SystemExit unless `headway serve` takes these flags."""
    parser = CommandParser(prog="headway serve")
    parser.add_argument("model", nargs="?")
    add_options(parser, ServeSettings)
    parser.parse_args(words)
