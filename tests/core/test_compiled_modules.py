"""Modules that wheels hold as machine code decide as they do interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.compiled_modules import PACKAGE, can_compile, compile_modules, split_types

from headway.core.errors import InvariantError

WORLDS = """
import sys
import numpy as np
from headway.cli.doctor import is_compiled
from headway.perf.latency.fitted import fitted
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.workload.generate import PoissonArrivals
from headway.sim.workload.generate import preset

print(is_compiled(), file=sys.stderr)
latency = fitted("a100-80gb", "llama-3-8b")
for seed, (policy, chunking, tokens, stages, groups) in enumerate((
    ("lars", "adaptive", 400_000, 1, 1),
    ("lars", "adaptive", 40_000, 2, 1),
    ("fcfs", "static:512", 60_000, 1, 1),
    ("srpt", "whole", 60_000, 1, 1),
    ("ladder", "adaptive", 30_000, 1, 2),
    ("ladder", "adaptive", 40_000, 1, 1),
)):
    requests = preset("azure-conv-like").draw(np.random.default_rng(seed), PoissonArrivals(12.0), 250)
    config = SchedulerConfig(policy=policy, chunking=chunking, stages=stages, kv_parallel=groups)
    spec = InstanceSpec(config=config, latency=latency, kv_tokens=tokens, block_tokens=16)
    result = simulate(spec, requests, RunSpec(keep_iterations=True))
    print(*result.iterations, *result.records, sep="\\n")
"""


@pytest.mark.long
@pytest.mark.skipif(not can_compile(), reason="needs mypyc and a C compiler")
@pytest.mark.timeout(900)
def test_compiled_and_interpreted_decide_the_same(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "headway", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    compile_modules(tmp_path)
    compiled, interpreted = run_worlds(tmp_path), run_worlds(PACKAGE.parent)
    assert (compiled.stderr.strip(), interpreted.stderr.strip()) == ("True", "False")
    assert len(interpreted.stdout.splitlines()) > 1500
    assert compiled.stdout == interpreted.stdout


def run_worlds(library: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(library)}
    command = [sys.executable, "-c", WORLDS]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=library)


def test_classes_that_cannot_be_compiled_move_to_a_module_beside(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        '"""One."""\nimport msgspec\nLIMIT = 3\nclass Facts(msgspec.Struct, frozen=True):\n    limit: int = LIMIT\n'
        "class Queue:\n    facts = Facts()\n"
    )
    assert split_types(tmp_path, Path("one.py")) == Path("one_types.py")
    code = "import one; print(one.Facts.__module__, one.Queue.__module__, one.Queue.facts.limit)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["one_types", "one", "3"]


def test_a_compiled_class_has_no_abstract_base(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""One."""\nfrom abc import ABC\nclass LatencyModel(ABC):\n    pass\n')
    assert split_types(tmp_path, Path("one.py")) is None
    text = (tmp_path / "one.py").read_text()
    assert "@_mypyc_attr(allow_interpreted_subclasses=True)\nclass LatencyModel:" in text


def test_a_class_that_inherits_from_an_interpreted_one_is_not_compiled(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""One."""\nimport two\nclass Table(two.Model):\n    pass\n')
    with pytest.raises(InvariantError, match=r"Table .* inherits from an interpreted class"):
        split_types(tmp_path, Path("one.py"))
