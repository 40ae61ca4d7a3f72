"""Every fenced snippet of the pages is read by what reads it: commands with the files and fields that they name by the
real parsers, YAML by the readers of such files, bodies of requests by the server's schema, Python by running it.
"""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from scripts.make_reference import engine_double
from tests.docs.test_docs import PAGES, ROOT

from headway.cli import plan, simulate
from headway.cli.main import COMMANDS, NESTED, PASSES_FLAGS, implementation
from headway.cli.serve import settings_of
from headway.core.strict_yaml import read_yaml
from headway.planning.question import parse_question
from headway.policy.hosted.settings import read_settings
from headway.runtime.cluster.cluster_file import cluster_file
from headway.serving.app import create_app
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer
from headway.sim.sweep import SweepPoint, parse_points, points_of
from headway_research.accelerator.command import StudySource
from headway_research.papers import PAPERS
from headway_research.registry import names

OWN = {"benchmarks", "deploy", "docs", "examples", "requirements", "scripts", "src", "tests"}
"""Folders of the repository; other files that a command names are the reader's own."""


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command; continued lines joined, comments, variables and prompts dropped."""
    text = ""
    for line in block.replace("\\\n", " ").splitlines():
        text += f"{line}\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            # A quote goes on in the next line.
            continue
        text = ""
        for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
            given = shlex.split(part)
            while given and (given[0] == "$" or re.match(r"[A-Z_]+=", given[0])):
                del given[0]
            if given:
                yield [given[0].removeprefix(".venv/bin/"), *given[1:]]
    assert not text.strip(), f"a quote that does not end: {text}"


def read_headway(words: list[str]) -> None:
    pair = (words[0], words[1]) if len(words) > 1 else ("", "")
    parser = ArgumentParser(exit_on_error=False)
    implementation(NESTED[pair] if pair in NESTED else COMMANDS[words[0]][0]).add_arguments(parser)
    given = words[2:] if pair in NESTED else words[1:]
    arguments = parser.parse_known_args(given)[0] if pair in PASSES_FLAGS else parser.parse_args(given)
    if pair not in NESTED and words[0] in FILES:
        FILES[words[0]](arguments)


def read_scenario(arguments: Namespace) -> None:
    if arguments.schema:
        return
    data, sweeps = simulate.read(arguments)
    if "pools" in data:
        # A point of a cluster file loads and measures its engines.
        for _, changed in points_of(data, sweeps):
            cluster_file(changed, str(arguments.scenario))
    else:
        assert all(isinstance(point, SweepPoint) for point in parse_points(data, sweeps))


def read_cluster(arguments: Namespace) -> None:
    if arguments.file.parts[0] in OWN:
        cluster_file(read_yaml(str(arguments.file), commands=("cluster",)), str(arguments.file))


def read_experiment(arguments: Namespace) -> None:
    assert arguments.id in (None, "all", *PAPERS, *names())


FILES: dict[str, Callable[[Namespace], Any]] = {
    "accel": lambda arguments: "file" in arguments and StudySource(arguments).study(),
    "cluster": read_cluster,
    "compare": read_scenario,
    "plan": lambda arguments: arguments.schema or plan._read(arguments),
    "reproduce": read_experiment,
    "serve": settings_of,
    "simulate": read_scenario,
}
"""What a command does with its file and fields before it computes."""


def read_vllm(words: list[str]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    for flag in ("--scheduler-cls", "--middleware", "--additional-config"):
        parser.add_argument(flag)
    given, _ = parser.parse_known_args(words)
    for path in filter(None, (given.scheduler_cls, given.middleware)):
        module, _, name = path.rpartition(".")
        assert name in import_module(module).__all__
    read_settings(json.loads(given.additional_config or "{}")).scheduler_config(8, 2048, 16, 1)


@cache
def endpoints() -> dict[str, Any]:
    described: dict[str, Any] = create_app(engine_double(), ModelTokenizer.none(), ServerSettings()).openapi()["paths"]
    return described


def read_curl(words: list[str]) -> None:
    address = next(word for word in words if "localhost" in word or "127.0.0.1" in word)
    path = urlsplit(address if "//" in address else f"//{address}").path
    (methods,) = (found for known, found in endpoints().items() if re.fullmatch(re.sub(r"{\w+}", "[^/]+", known), path))
    if "-d" not in words:
        assert "get" in methods
        return
    schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert json.loads(words[words.index("-d") + 1]).keys() <= schema["properties"].keys()


def read_targets(words: list[str]) -> None:
    assert set(words) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


PROGRAMS: dict[str, Callable[[list[str]], object]] = {
    "headway": read_headway, "vllm": read_vllm, "curl": read_curl, "make": read_targets,
    **dict.fromkeys(("docker", "export", "pip", "podman", "python3.11", "ray"), lambda words: None),
}  # fmt: skip


def read_command(words: list[str]) -> None:
    for word in words:
        assert word.split("/")[0] not in OWN or (ROOT / word).exists(), f"there is no {word}"
    PROGRAMS[words[0]](words[1:])


YAML: dict[str, Callable[[Any], object]] = {
    "cluster.md": lambda data: cluster_file({"pools": data} if isinstance(data, list) else data, "cluster.md"),
    "several-hosts.md": lambda data: cluster_file(data, "several-hosts.md"),
    "plan.md": lambda data: parse_question(data, "plan.md"),
}


def read_block(page: Path, language: str, text: str) -> None:
    if language == "yaml":
        YAML[page.name](yaml.safe_load(text))
    elif language == "json":
        json.loads(text)
    elif language == "python":
        # `test_python_api` runs those of its page.
        if page.name != "python-api.md":
            exec(compile(text, str(page), "exec"), {})
    else:
        assert language == "text", f"a fence of a kind that nothing reads: {language}"


def test_every_snippet_is_read_by_what_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    refused, count = [], 0
    for page in PAGES:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            shell = language in ("", "sh", "console")
            for part in commands(text) if shell else (text,):
                count += 1
                try:
                    read_command(part) if shell else read_block(page, language, part)
                except (Exception, SystemExit) as error:
                    refused.append((page.name, part, repr(error)))
    assert refused == []
    assert count > 120
