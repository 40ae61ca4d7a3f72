"""The convoy in vLLM's scheduler at equal gaps between tokens: thresholds against Headway inside, in virtual time.

    .venv-vllm/bin/python benchmarks/peers/vllm_equal_gaps.py --long-tokens 16384

vLLM's real scheduler and block pool around a model runner whose steps take what a roofline says: by default the
reference checkpoint on two slow cores. A chat of 200/16 comes each second, and a long prompt among them; times are of
the chats that come while it is read. Each stock setting is compared with the plug-in at the aim that gives chats the
same P99 gap (found by bisection), as ratios of the stock setting's times. Last, what is alone: a chat, a long prompt,
eight decodes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_sessions import TracedEngine, as_table

from headway.perf.hardware import ModelShape
from headway.perf.latency.table import MachineRates, TableLatency, TableSource, roofline, save
from headway.sim.workload import TraceRequest

SHAPE = ModelShape(layers=8, hidden=512, q_heads=8, kv_heads=2, head_dim=64, mlp=1536, vocab=4096)
RATES = MachineRates(
    linear_flops=1.2e11, attention_flops=3e11, bandwidth=2e10, fixed_s=3e-3, per_decode_s=2e-5, name="two slow cores"
)


LONG_AT_S = 3.5


class Times(NamedTuple):
    """Seconds."""

    ttft_p50: float
    ttft_p99: float
    tbt_p99: float
    long_s: float


class Convoys:
    """Runs of one convoy."""

    def __init__(self, model: Any, source: TableSource, profile: Path, a: argparse.Namespace) -> None:
        self._model, self._source, self._profile, self._a = model, source, profile, a

    def run(self, setting: str, requests: list[TraceRequest] | None = None) -> Times:
        """Return the times under `default`, a threshold in tokens, or `headway:AIM_MS`."""
        a = self._a
        requests = convoy(a) if requests is None else requests
        plugged = setting.startswith("headway:")
        aim_ms = float(setting.removeprefix("headway:")) if plugged else None
        engine = TracedEngine(
            self._model, TableLatency(self._source), requests, stock=not plugged, blocks=8192,
            settings={"profile": str(self._profile), "t_target_ms": aim_ms} if plugged else None,
            batched_tokens=a.batched_tokens, max_num_seqs=64, threshold=int(setting) if setting.isdigit() else 0,
        )  # fmt: skip
        engine.play()
        longs = [str(n) for n, r in enumerate(requests) if r.klass == "long"]
        until_s = max(engine.finished[name] for name in longs)
        beside = [
            str(n) for n, r in enumerate(requests) if r.klass == "chat" and LONG_AT_S < engine.arrived[str(n)] < until_s
        ]
        p50, p99 = np.percentile([engine.ttft_s(name) for name in beside] or [0.0], (50, 99))
        gap_s = float(np.percentile(engine.gaps_of(beside), 99))
        return Times(float(p50), float(p99), gap_s, max(engine.finished[n] - engine.arrived[n] for n in longs))

    def with_gap(self, gap_s: float) -> tuple[float, Times]:
        """Return the largest aim, ms, whose P99 gap is at most `gap_s`, and its times."""
        low, high = 1.0, 4e3 * gap_s
        best = low, self.run(f"headway:{low:.3f}")
        for _ in range(12):
            aim = (low * high) ** 0.5
            times = self.run(f"headway:{aim:.3f}")
            if times.tbt_p99 <= gap_s:
                low, best = aim, (aim, times)
            else:
                high = aim
        return best


def convoy(a: argparse.Namespace) -> list[TraceRequest]:
    """Return chats a second apart, and long prompts after the fourth."""
    chats = [TraceRequest(float(n), 200, 16, klass="chat") for n in range(a.chats)]
    longs = [TraceRequest(LONG_AT_S, a.long_tokens, 16, klass="long") for _ in range(a.longs)]
    return sorted([*chats, *longs], key=lambda r: r.arrival_s)


def alone(convoys: Convoys, a: argparse.Namespace, aim_ms: float) -> None:
    """Print ratios of what runs alone."""
    several = [TraceRequest(0.0, 200, 200, klass="long") for _ in range(8)]
    for what, requests in (
        ("chat", [TraceRequest(0.0, 200, 16, klass="long")]),
        ("long prompt", [TraceRequest(0.0, a.long_tokens, 16, klass="long")]),
        ("eight decodes", several),
    ):
        stock, plugged = (convoys.run(s, requests).long_s for s in ("default", f"headway:{aim_ms:g}"))
        print(f"| {what} alone | {stock:.2f} s | {plugged:.2f} s | {plugged / stock:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long-tokens", type=int, default=16_384)
    parser.add_argument("--longs", type=int, default=1, help="long prompts, which come together")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--thresholds", default="64,128,256,512")
    parser.add_argument("--batched-tokens", type=int, default=2048)
    a = parser.parse_args()
    # The engine also logs that long_prefill_token_threshold is set.
    logging.disable(logging.INFO)
    from tests.vllm.contract.virtual_engine import model_config

    with tempfile.TemporaryDirectory() as folder:
        source = as_table(roofline(SHAPE, RATES))
        profile = Path(folder) / "profile.json"
        save(source, profile)
        convoys = Convoys(model_config(Path(folder)), source, profile, a)
        print("| setting | chats' TTFT P50 / P99, s | TBT P99, s | long, s | TTFT P99, ratio | long, ratio |")
        print("|---|---|---|---|---|---|")
        for setting in ("default", *a.thresholds.split(",")):
            stock = convoys.run(setting)
            print(row(setting, stock), flush=True)
            if setting != "default":
                aim_ms, plugged = convoys.with_gap(stock.tbt_p99)
                ratios = plugged.ttft_p99 / stock.ttft_p99, plugged.long_s / stock.long_s
                print(row(f"Headway, aim {aim_ms:.0f} ms", plugged, *ratios), flush=True)
        print("\n| what | stock | Headway, aim 150 ms | ratio |\n|---|---|---|---|")
        alone(convoys, a, 150.0)


def row(name: str, times: Times, *ratios: float) -> str:
    """Return a line of the table."""
    shown = [f"{ratio:.2f}" for ratio in ratios] or ["", ""]
    first = f"{times.ttft_p50:.2f} / {times.ttft_p99:.2f}"
    return f"| {name} | {first} | {times.tbt_p99:.3f} | {times.long_s:.1f} | {' | '.join(shown)} |"


if __name__ == "__main__":
    main()
