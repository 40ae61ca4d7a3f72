"""`headway doctor`: what this machine can do, and what is missing."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="where a server would listen")


def run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from headway.cli.machine_findings import findings
    from headway.core.ports import check_port

    check_port(arguments.port)
    found = list(findings(arguments.port))
    if arguments.json:
        import json

        print(json.dumps([asdict(one) for one in found], indent=1))
        return 0
    marks = {"ok": "✓", "limited": "!", "absent": "-"}
    width = max(len(one.subject) for one in found)
    for one in found:
        advice = f"\n{' ' * (width + 4)}→ {one.advice}" if one.advice else ""
        print(f"{marks[one.state]} {one.subject:<{width}}  {one.what}{advice}")
    return 0
