"""Print what the code base looks like in numbers, as a Markdown table: `python scripts/code_figures.py`.

Product is `src/headway` without `research`; research reproduces the papers and holds the demo. Complexity is McCabe's,
as `ruff check --select C901` counts it. `--before REVISION` adds a column of an earlier commit, `--write` puts the
table at the end of docs/architecture.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

RESEARCH = ("research", "experiments")
"""Packages that count as research; `experiments` is the earlier name."""
MARK = "<!-- code figures -->"
LONG_FUNCTION, COMPLEX, LONG_FILE, MANY_METHODS = 60, 15, 400, 25


def figures(root: Path) -> dict[str, float]:
    """Every number of one checkout, by its name in the table."""
    source = root / "src" / "headway"
    product, research, tests = [], [], sorted((root / "tests").rglob("*.py"))
    for path in sorted(source.rglob("*.py")):
        (research if path.relative_to(source).parts[0] in RESEARCH else product).append(path)
    trees = {path: ast.parse(path.read_text()) for path in product + research}
    classes = [node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    uses = Counter(classes)
    lengths = [length for tree in trees.values() for length in function_lengths(tree)]
    code_lines = sum(line_count(path) for path in trees)
    return {
        "top-level packages": sum((entry / "__init__.py").exists() for entry in source.iterdir()),
        "source files": len(trees),
        "lines of product": sum(line_count(path) for path in product),
        "lines of research": sum(line_count(path) for path in research),
        "lines of tests": sum(line_count(path) for path in tests),
        "classes": len(classes),
        "one-word class names, %": share(sum(words(name) == 1 for name in classes), len(classes)),
        "classes that share their name, %": share(sum(uses[name] > 1 for name in classes), len(classes)),
        "comment lines, %": share(sum(comment_lines(path) for path in trees), code_lines),
        f"files over {LONG_FILE} lines": sum(line_count(path) > LONG_FILE for path in trees),
        f"functions over {LONG_FUNCTION} lines": sum(length > LONG_FUNCTION for length in lengths),
        f"functions of complexity over {COMPLEX}": complex_functions(source),
        f"classes with more than {MANY_METHODS} methods": sum(
            methods > MANY_METHODS for methods in method_counts(trees)
        ),
        "words of docs, written": docs_words(root / "docs", generated=False),
        "words of docs, generated": docs_words(root / "docs", generated=True),
    }


def share(part: int, whole: int) -> float:
    return round(100 * part / max(1, whole), 2)


def words(name: str) -> int:
    """Words of a CamelCase name; an acronym is one."""
    return len(re.findall(r"[A-Z]+(?=[A-Z][a-z]|\d|$)|[A-Z]?[a-z]+|[A-Z]", name.strip("_")))


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def comment_lines(path: Path) -> int:
    """Lines that are a comment and nothing else, tool directives left out."""
    found = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            found += not re.match(r"#\s*(noqa|type:|fmt:|ruff:|mypy:|!)", token.string)
    return found


def function_lengths(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.end_lineno - node.lineno + 1


def method_counts(trees: dict[Path, ast.Module]) -> Iterator[int]:
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)


def complex_functions(source: Path) -> int:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--output-format", "json"]
    command += ["--config", f"lint.mccabe.max-complexity={COMPLEX}", str(source)]
    return len(json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout))


def docs_words(docs: Path, generated: bool) -> int:
    """Words of Markdown pages, as `wc -w` counts; generated pages say so in their first line."""
    pages = [page.read_text() for page in docs.rglob("*.md")]
    return sum(len(page.split()) for page in pages if page.startswith("<!-- Generated") == generated)


def before(revision: str) -> dict[str, float]:
    """The figures of an earlier commit, from `git archive`."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", str(root), "archive", revision], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return figures(Path(folder))


def markdown(columns: dict[str, dict[str, float]]) -> str:
    """One row a figure, one column a checkout."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    names = next(iter(columns.values()))
    lines += [f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns.values())} |" for name in names]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--before", metavar="REVISION", help="a column of an earlier commit too")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/architecture.md, under its marker"
    )
    arguments = parser.parse_args()
    columns = {f"{arguments.before}": before(arguments.before)} if arguments.before else {}
    columns["now"] = figures(arguments.root)
    if arguments.json:
        print(json.dumps(columns, indent=1))
        return 0
    print(markdown(columns), end="")
    if arguments.write:
        page = arguments.root / "docs" / "architecture.md"
        page.write_text(page.read_text().split(MARK)[0] + MARK + "\n\n" + markdown(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
