"""What the pages say is there: names, paths, links, commands and generated reference pages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from headway.sim.spec import VllmSection

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md")) + [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")
]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "headway").iterdir() if (path / "__init__.py").exists())
STUDIES = "headway_research"
GENERATED = "<!-- Generated"


def written_text(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def resolves(name: str) -> bool:
    """Whether a dotted name under `headway` or `headway_research` is a module, or something in one."""
    parts = tuple(name.split("."))
    if parts[0] not in ("headway", STUDIES):
        parts = ("headway", *parts)
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            if not hasattr(found, attribute) and attribute not in getattr(found, "__annotations__", {}):
                return False
            found = getattr(found, attribute, None)  # type: ignore[assignment]
        return True
    return False


def unknown_modules(page: Path) -> list[str]:
    pattern = rf"`((?:headway\.)?(?:{'|'.join((*PACKAGES, STUDIES))})(?:\.\w+)+)`"
    named = set(re.findall(pattern, written_text(page)))
    fields = {"policy.policy", "policy.t_target_s", "policy.medha"}
    fields |= {f"vllm.{name}" for name in VllmSection.model_fields} | {"vllm.headway.classes"}
    return [name for name in sorted(named) if name not in fields and not resolves(name)]


def missing_paths(page: Path) -> list[str]:
    text = page.read_text()
    top = "|".join(("src", "tests", "docs", "examples", "scripts", "benchmarks", STUDIES, *PACKAGES))
    paths = set(re.findall(rf"(?<![\w./])((?:{top})/[\w./-]*\w)", text))
    roots = (ROOT, ROOT / "src", ROOT / "src" / "headway")
    return [path for path in sorted(paths) if not any((root / path).exists() for root in roots)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        text = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
        found.add(re.sub(r"[\s]+", "-", text))
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", written_text(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


def unknown_targets_and_benchmarks(page: Path) -> list[str]:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    modules = re.findall(r"python -m (benchmarks\.\w+)", text)
    missing = [module for module in modules if not (ROOT / (module.replace(".", "/") + ".py")).exists()]
    return [*sorted(named - targets), *missing]


@pytest.mark.parametrize("faults", [unknown_modules, missing_paths, broken_links, unknown_targets_and_benchmarks])
def test_what_a_page_names_exists(faults: Callable[[Path], list[str]]) -> None:
    assert {page.name: found for page in PAGES if (found := faults(page))} == {}


def test_reference_pages_are_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "--check"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, f"run `make docs`:\n{outcome.stdout}{outcome.stderr}"


def test_docs_do_not_grow_back() -> None:
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    written = [word for page in pages if GENERATED not in page for word in page.split()]
    # The bars of tables are no words.
    assert sum(any(map(str.isalnum, word)) for word in written) < 16_100


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra `docs` is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert (tmp_path / "site" / "architecture.html").exists()
