"""Draw docs/figures/live-page.png: the live page of a simulated run, in a headless browser.

Run: python -m scripts.make_live_picture [--out FILE] [--width 1280] [--dark]. Needs the distribution's chromium and
chromium-driver.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from scripts.headless_browser import browser, missing_browser
from tests.helpers.unit_latency import small_machine

from headway.policy.iteration.config import SchedulerConfig
from headway.serving.live.pages import LogPlayer, create_app
from headway.serving.live.recordings import EngineRecording
from headway.sim.loop import simulate
from headway.sim.metrics import SloTargets
from headway.sim.replay import ReplayedRun, replay
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.workload import TraceRequest

ROOT = Path(__file__).resolve().parents[1]
SHOWN_S = 46.0


def chats_and_documents(seed: int = 3) -> ReplayedRun:
    """A minute of three chats a second, and a document every few seconds, on one engine of a small machine."""
    chance, at_s = random.Random(seed), 0.0
    workload = [TraceRequest(3.0 + 7.0 * i, chance.choice([16_000, 32_000]), 60) for i in range(8)]
    while at_s < 60.0:
        at_s += chance.expovariate(3.0)
        klass = chance.choice(["strict", "chat", "chat"])
        workload.append(TraceRequest(at_s, chance.randrange(60, 700), chance.randrange(20, 120), klass))
    config = SchedulerConfig(t_target_s=0.04)
    spec = InstanceSpec(config=config, latency=small_machine(), kv_tokens=150_000, block_tokens=16)
    events: list[dict[str, Any]] = []
    ordered = sorted(workload, key=lambda one: one.arrival_s)
    run = RunSpec(timeout_s=120.0, targets={"strict": SloTargets(ttft_s=0.06), "chat": SloTargets(ttft_s=0.5)})
    simulate(spec, ordered, run, log=lambda kind, more: events.append({"event": kind, **more}))
    return replay(json.loads(json.dumps(events)), detail=True)


def main() -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "live-page.png")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1010)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--why", action="store_true", help="with the explanation of the request that waited longest")
    arguments = parser.parse_args()
    if (why := missing_browser()) is not None:
        print(why, file=sys.stderr)
        return 1
    player = LogPlayer(EngineRecording(chats_and_documents()), "chats and documents")
    server = uvicorn.Server(uvicorn.Config(create_app(player), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/ui/"
    with browser() as tab:
        tab.open(url, arguments.width, arguments.height, arguments.dark)
        tab.wait("return Number(document.body.dataset.updates || 0)")
        # Stopped at a moment with something of everything.
        tab.run(
            "document.getElementById('play').click(); const seek = document.getElementById('seek');"
            f"seek.value = 1000 * {SHOWN_S} / parseFloat(document.getElementById('clock').textContent.split('/')[1]);"
            "seek.dispatchEvent(new Event('input'))"
        )
        tab.wait("return document.querySelector('#recent .row')")
        now = tab.run("return Number(document.body.dataset.updates)")
        tab.wait(f"return Number(document.body.dataset.updates) > {now + 1}")
        if arguments.why:
            tab.run("document.querySelector('#waiting .row').click()")
            tab.wait("return document.querySelector('#why .strip')")
        tab.shoot(arguments.out)
    server.should_exit = True
    thread.join(5)
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
