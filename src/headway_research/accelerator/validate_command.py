"""`headway accel validate`: the paper's figures beside those computed here, as pins that must not move."""

from __future__ import annotations

import argparse
import json
from typing import Any

from headway_research.accelerator.output import write_json
from headway_research.accelerator.pins import PinnedFigure, pins

SCHEMA = "headway.accel.validate/1"


def validate(arguments: argparse.Namespace) -> int:
    """Run `headway accel validate`; return 1 when a pinned figure has moved or differs from zigzag's by over 10%."""
    from headway.sim.report.accel_table import crosscheck_report, validate_report
    from headway.sim.report.console import show

    if arguments.schema:
        from headway_research.accelerator.study_file import AccelFile

        print(json.dumps(AccelFile.model_json_schema(), indent=2))
        return 0
    rows = pins()
    found: dict[str, Any] = {"schema": SCHEMA, "pins": [pin.to_json() for pin in rows], "summary": summary(rows)}
    ok = all(pin.ok for pin in rows)
    if arguments.zigzag:
        from headway.perf.accelerator.zigzag import crosscheck

        products = crosscheck()
        found["zigzag"] = [product.to_json() for product in products]
        ok = ok and all(product.ok for product in products)
        found["summary"] += f"; zigzag: {sum(p.ok for p in products)} of {len(products)} products agree to 10%"
    if not write_json(arguments.json, found):
        show(validate_report(found))
        if arguments.zigzag:
            show(crosscheck_report(found["zigzag"]))
        print(found["summary"])
    return 0 if ok else 1


def summary(rows: list[PinnedFigure]) -> str:
    """Return the verdict on all pins in one line."""
    paper, own = ([pin for pin in rows if pin.kind == kind] for kind in ("paper", "own"))
    worst = max(paper, key=lambda pin: abs(pin.error))
    moved = [pin.name for pin in rows if not pin.ok]
    verdict = "nothing moved" if not moved else f"MOVED: {'; '.join(moved)}"
    return (
        f"{sum(p.ok for p in paper)} of {len(paper)} paper figures within {paper[0].tolerance:.0%} "
        f"(worst {worst.error:+.2%}: {worst.name}); {sum(p.ok for p in own)} of {len(own)} own pins hold; {verdict}"
    )
