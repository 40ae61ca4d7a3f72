"""Machine code for the modules through which every decision and every simulated iteration goes.

mypyc makes it from the modules' own source whenever a wheel is built (setup.py). A checkout, an editable install and a
machine without a C compiler run the same modules interpreted, with the same results. Compiled, counts have to be
Python's own integers: NumPy's are a TypeError.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from headway.core.errors import InvariantError

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "headway"
MODULES = (
    "kv/allocator",
    "kv/block_manager",
    "perf/latency/base",
    "perf/latency/corrected",
    "perf/latency/table",
    *(
        f"policy/iteration/{name}"
        for name in (
            "admission",
            "scheduler",
            "decision",
            "requests",
            "budget",
            "fill",
            "state",
            "medha",
            "queue",
        )
    ),
    "policy/ladder",
    "sim/engine",
)
"""Files of the package that are compiled, without suffix. Together they call each other as C functions."""
SUBCLASSED = {"CoupledLatency", "LatencyModel", "SimulatedEngine", "WrappedLatency"}
"""Compiled classes that have subclasses in interpreted modules."""
INTERPRETED_BASES = {"msgspec.Struct", "Protocol", "NamedTuple"}
"""Classes with such bases stay interpreted: mypyc drops the options of a class statement (`frozen=True`), and
interpreted classes inherit from protocols."""
COMPILED_BASES = {"ABC", "LatencyModel", "PrefillState", "WaitingQueue", "WrappedLatency"}
"""A compiled class inherits from compiled ones only, and from `ABC` only as source. mypyc gives heirs of interpreted
classes a `__weakref__` that the garbage collector frees while it is in use."""
_MYPY_SETTINGS = """[mypy]
follow_imports = silent
ignore_missing_imports = True
explicit_package_bases = True
[mypy-torch.*,matplotlib.*,pandas.*,pydantic.*,rich.*,yaml.*]
follow_imports = skip
"""
_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
arguments = ["--config-file", "mypy.ini", *sys.argv[1:]]
extensions = mypycify(arguments, opt_level="2", debug_level="0", group_name="headway")
setup(name="headway-compiled", packages=[], ext_modules=extensions, script_args=["-q", "build_ext", "--inplace"])
"""


def can_compile() -> bool:
    """Whether mypyc, what the modules import, and a C compiler are here."""
    compiler = str(sysconfig.get_config_var("CC") or "cc").split()[0]
    needed = ("mypyc", "setuptools", "numpy", "msgspec")
    return all(importlib.util.find_spec(name) for name in needed) and shutil.which(compiler) is not None


def compile_modules(library: Path) -> None:
    """Compile `MODULES` of this package into `library`, the folder that holds the package `headway` of a wheel.

    Takes one to two minutes. Raises CalledProcessError, and changes nothing, when a module does not compile or load."""
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder)
        shutil.copytree(PACKAGE, build / "headway", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        files = [Path("headway") / f"{module}.py" for module in MODULES]
        made = [types for file in files if (types := split_types(build, file)) is not None]
        (build / "mypy.ini").write_text(_MYPY_SETTINGS)
        subprocess.run([sys.executable, "-c", _SETUP, *map(str, files)], cwd=build, check=True)
        shutil.rmtree(build / "build")
        # Those of `sim` import what a build environment has not.
        loaded = [f"import headway.{module.replace('/', '.')}" for module in MODULES if not module.startswith("sim/")]
        subprocess.run([sys.executable, "-c", "\n".join(loaded)], cwd=build, check=True)
        made += [path.relative_to(build) for path in build.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}")]
        for file in made:
            shutil.copy(build / file, library / file)


def split_types(root: Path, file: Path) -> Path | None:
    """Move the classes of a module that must stay interpreted to a new one beside it, from which it imports them.

    Both are relative to `root`. Return the new one; None: there are no such classes."""
    text = (root / file).read_text()
    lines, body = text.splitlines(keepends=True), ast.parse(text).body
    moved: list[ast.ClassDef] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if bases & (INTERPRETED_BASES | {known.name for known in moved}):
                moved.append(node)
            elif bases - COMPILED_BASES:
                raise InvariantError(f"{node.name} in {file} inherits from an interpreted class: it cannot be compiled")
            elif "ABC" in bases:
                lines[node.lineno - 1] = lines[node.lineno - 1].replace("(ABC)", "")
            if node.name in SUBCLASSED:
                lines[node.lineno - 1] = "@_mypyc_attr(allow_interpreted_subclasses=True)\n" + lines[node.lineno - 1]
    begin = max(
        node.end_lineno or 0 for node in body if isinstance(node, ast.Import | ast.ImportFrom) or _is_typing(node)
    )
    head = "".join(lines[(body[0].end_lineno or 0) : begin])
    if any(line.startswith("@_mypyc_attr") for line in lines):
        # mypy takes this branch; no program runs it.
        lines[begin - 1] += "MYPY = False\nif MYPY:\n    from mypy_extensions import mypyc_attr as _mypyc_attr\n"
    types = file.with_name(f"{file.stem}_types.py") if moved else None
    if types is not None:
        used = {name.id for node in moved for name in ast.walk(node) if isinstance(name, ast.Name)}
        aliases = [n for n in body if isinstance(n, ast.Assign) and {ast.unparse(t) for t in n.targets} & used]
        pieces = ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in [*aliases, *moved]]
        (root / types).write_text(head + "\n\n".join(pieces))
        names = ", ".join(node.name for node in moved)
        lines[begin - 1] += f"from {'.'.join(types.with_suffix('').parts)} import {names}\n"
        for node in moved:
            for line in range(node.lineno - 1, node.end_lineno or 0):
                lines[line] = ""
    (root / file).write_text("".join(lines))
    return types


def _is_typing(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
