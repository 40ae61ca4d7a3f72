"""requirements/*.lock: what pyproject.toml asks for, with all that it needs, each at one version."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from scripts.audit import UNAVAILABLE, verdict
from scripts.make_lock import LOCKS, closure, direct

ROOT = Path(__file__).parents[2]


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    found = [re.fullmatch(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.]*)", line) for line in lines if not line.startswith("#")]
    assert all(found), "one name and version a line, no hosts"
    return {each[1]: each[2] for each in found if each}


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_to_a_version_that_it_allows(name: str) -> None:
    versions = pinned(name)
    for requirement in direct(LOCKS[name]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    # Versions may be others here; what is needed, and so the names, may not.
    assert set(closure(direct(LOCKS[name]))) == set(versions), "run `python scripts/make_lock.py`"


def test_a_list_of_packages_names_versions_and_licences(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_lock.py", "--sbom", tmp_path / "s.json"], check=True)
    listed = json.loads((tmp_path / "s.json").read_text())
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    torch = next(each for each in listed["components"] if each["name"] == "torch")
    assert torch["purl"] == f"pkg:pypi/torch@{torch['version']}"
    assert torch["licenses"][0]["license"]["name"] != "not stated"


def test_an_audit_passes_only_when_every_package_was_looked_up() -> None:
    sound = {"name": "jinja2", "version": "3.1.6", "vulns": []}
    flawed = {"name": "old", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
    skipped = {"name": "own", "skip_reason": "Dependency not found on PyPI"}
    assert verdict([sound]) == (0, ["no known vulnerability in 1 packages"])
    assert verdict([sound, flawed]) == (1, ["old 1.0: PYSEC-1, mended in 1.1"])
    assert verdict([sound, skipped])[0] == UNAVAILABLE
    assert verdict([skipped, flawed])[0] == 1, "what was found counts, whatever was not looked up"
    assert verdict([])[0] == UNAVAILABLE
