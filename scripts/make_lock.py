"""Pin what the package needs, and all that this needs in turn, to the versions of the environment that runs this.

Run: python scripts/make_lock.py [--sbom FILE]. Writes requirements/serve.lock (`headway[serve]`) and dev.lock
(`headway[serve,plot,dev]`), for `pip install -c`. Names and versions only: no hosts and no hashes, so that one file
serves wheels of any build of a version (torch for CPU and for CUDA). --sbom: a CycloneDX list of the same packages
instead.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {"serve": ("serve",), "dev": ("serve", "plot", "dev")}


def direct(extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements that pyproject.toml states."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    return [Requirement(each) for each in named]


def closure(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Return the version of every package that `wanted` needs here, by name. Raises SystemExit for a missing one."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(requirement, extra) for requirement in wanted for extra in ("", *requirement.extras)]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            raise SystemExit(f"{requirement} is not installed: run `make setup` first") from None
        # Without the local label: +cpu is a build of the version, not another version.
        found[name] = Version(package.version).public
        for text in package.requires or ():
            inner = Requirement(text)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                queue += [(inner, each) for each in ("", *inner.extras)]
    return dict(sorted(found.items()))


def sbom(packages: dict[str, str]) -> str:
    """Return the packages as CycloneDX 1.6 JSON, with the licence that each states."""
    components = [
        {
            "type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}",
            "licenses": [{"license": {"name": licence(name)}}],
        }
        for name, version in packages.items()
    ]  # fmt: skip
    return json.dumps(
        {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}, indent=1
    )


def licence(name: str) -> str:
    """Return the licence of an installed package in its own words."""
    fields = distribution(name).metadata
    classified = [each.rpartition(" :: ")[2] for each in fields.get_all("Classifier", ()) if each.startswith("License")]
    stated = fields["License-Expression"] or (fields["License"] or "").partition("\n")[0]
    return stated or ", ".join(classified) or "not stated"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sbom", type=Path, help="write a list of serve.lock's packages here instead")
    target = parser.parse_args().sbom
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(sbom(closure(direct(LOCKS["serve"]))) + "\n")
        return
    (ROOT / "requirements").mkdir(exist_ok=True)
    for name, extras in LOCKS.items():
        lines = [f"{package}=={version}\n" for package, version in closure(direct(extras)).items()]
        (ROOT / "requirements" / f"{name}.lock").write_text("# Made by scripts/make_lock.py.\n" + "".join(lines))


if __name__ == "__main__":
    main()
