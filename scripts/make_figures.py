"""Draw the figures of README and docs: `make figures`. Half an hour on 2 cores.

vllm-convoy.png: one document and chats in vLLM on a virtual clock, as its defaults, the best of its thresholds and
Headway inside it serve them; its numbers are in vllm-convoy.json. convoy.png and convoy.json come from `headway demo`
on this machine, overload.png from its table, those of papers from `headway reproduce`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.policy_table import draw_overload
from scripts import make_cluster_figures, make_ladder_picture

from headway import simulate
from headway.sim.metrics import percentiles
from headway.sim.report.plots import convoy_figure, save

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
DOCUMENT_TOKENS = 100_000
THRESHOLDS = (2048, 1024, 512, 256, 128, 64)
REPRODUCTIONS = {"medha.fig5b": "medha-spp.png", "pecsched.headlines": "pecsched-regimes.png"}
ABOUT = "Llama-3-8B on an A100-80GB, vLLM 0.32, virtual time"


def convoy_scenario(scheduler: str, folder: Path) -> dict[str, Any]:
    """Return the scenario of one document and chats behind it in vLLM."""
    rows = [f"0,{DOCUMENT_TOKENS},200,document", *(f"{0.25 + 0.25 * at:g},250,120,chat" for at in range(120))]
    trace = folder / "convoy.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,class\n" + "\n".join(rows) + "\n")
    return {
        "engine": "vllm",
        "vllm": {"scheduler": scheduler},
        "model": "llama-3-8b",
        "cluster": {"accelerator": "a100-80gb"},
        "workload": {"trace": str(trace)},
    }


def convoy_run(name: str, scheduler: str, folder: Path) -> dict[str, Any]:
    """Return one run as `headway bench convoy --json` writes it: the chats that came before the document was read."""
    rows = simulate(convoy_scenario(scheduler, folder)).rows()
    long_s = next(row["ttft_s"] for row in rows if row["class"] == "document")
    chats = [row for row in rows if row["class"] == "chat" and row["arrival_s"] < long_s]
    series = [{"t_s": row["arrival_s"], "ttft_s": round(row["ttft_s"], 4)} for row in chats]
    return {
        "policy": name,
        "scheduler": scheduler,
        "short": {"ttft_s": percentiles([row["ttft_s"] for row in chats])},
        "long": {"ttft_s": {"p50": long_s}},
        "convoys": [{"series": series}],
    }


def vllm_convoy() -> dict[str, Any]:
    """Return the convoy in vLLM; of its thresholds the one with the shortest median wait of chats."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: convoy_run(name, name, Path(folder)) for name in ("default", "plugged")}
        tried = [convoy_run(f"vLLM at its best:\nthreshold {t}", f"threshold:{t}", Path(folder)) for t in THRESHOLDS]
    best = min(tried, key=lambda run: run["short"]["ttft_s"]["p50"])
    runs["default"]["policy"], runs["plugged"]["policy"] = "vLLM, default", "Headway in vLLM"
    return {"plan": {"long_tokens": DOCUMENT_TOKENS}, "runs": [runs["default"], best, runs["plugged"]]}


def draw_vllm_convoy() -> None:
    """Write vllm-convoy.png and its numbers."""
    data = vllm_convoy()
    (FIGURES / "vllm-convoy.json").write_text(json.dumps(data, indent=1) + "\n")
    save(convoy_figure(data, about=ABOUT), FIGURES / "vllm-convoy.png")


def draw_demo() -> int:
    """Run `headway demo`, and keep its picture and numbers where it succeeds; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headway.cli.main", "demo", "--out", folder]
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            for name in ("convoy.png", "convoy.json"):
                shutil.copy(Path(folder) / name, FIGURES / name)
    return status


def draw_reproductions() -> None:
    """Draw the charts of reproductions that the pages of papers show."""
    for name, picture in REPRODUCTIONS.items():
        command = [sys.executable, "-m", "headway.cli.main", "reproduce", name, "--plot", str(FIGURES / picture)]
        subprocess.run(command, check=True)


def main() -> int:
    """Draw all."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    draw_overload()
    draw_vllm_convoy()
    make_ladder_picture.main()
    make_cluster_figures.main()
    draw_reproductions()
    return draw_demo()


if __name__ == "__main__":
    sys.exit(main())
