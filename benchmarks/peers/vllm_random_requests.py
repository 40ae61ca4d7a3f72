"""Greedy tokens of random requests inside vLLM, stock against plugged, under all that disturbs a request at once.

python scripts/make_checkpoint.py --hidden 128 --layers 2 --heads 4 --mlp 256 --dtype float32 --out out/tiny
.venv-vllm/bin/python benchmarks/peers/vllm_random_requests.py --model out/tiny --requests 500 --json out/tokens.json

Requests come at random steps, a third with a shared prefix, with priorities, and a pool so small that vLLM preempts; a
tenth are aborted. The engine runs in a process of its own for each run, without a server, so that the steps are the
same for every run but for what the scheduler decides. Where two runs differ, compare two stock runs whose chunks differ
(`--runs stock,stock:64`): sums in another order round otherwise, and two logits may be nearly equal.

With `--tp`, `--pp` (compiled: `--pp 2 --compiled`) each rank has a core; `--tp 2 --nodes 2` starts the second rank as
`vllm serve --headless` of another node, on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.core.machine import free_port


def plan(count: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Return the requests: the step in which each comes, its tokens, output, priority, and when it is aborted."""
    chance = random.Random(seed)
    shared = [chance.randrange(10, 4000) for _ in range(longest // 2)]
    requests = []
    for i in range(count):
        length = max(1, int(longest ** chance.uniform(0.1, 1.0)))
        prompt = [chance.randrange(10, 4000) for _ in range(length)]
        if i % 3 == 0:
            prompt = (shared[: chance.randrange(len(shared))] + prompt)[:longest]
        requests.append(
            {
                "step": chance.randrange(count),
                "prompt": prompt,
                "output": chance.randrange(1, 40),
                "priority": chance.choice([0, 0, 0, 1, -1]),
                "aborted_after": chance.randrange(40) if chance.random() < 0.1 else None,
                "slo": chance.random() < 0.3,
            }
        )
    return requests


def run_engine(a: argparse.Namespace) -> dict[str, Any]:
    """Run all requests in this process. Return tokens by request (None: aborted) and what disturbed them."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    kind, _, value = a.child.partition(":")
    extra: dict[str, Any] = {}
    if kind == "headway":
        settings = {"t_target_ms": float(value)} if value else {}
        extra = {"scheduler_cls": "headway.vllm.Scheduler", "additional_config": {"headway": settings}}
    elif value:
        extra = {"long_prefill_token_threshold": int(value)}
    if a.nodes > 1:
        extra |= {"nnodes": a.nodes, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": a.port}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=a.model, dtype="float32", enforce_eager=not a.compiled, block_size=32,
            num_gpu_blocks_override=a.blocks, max_model_len=a.longest + 64, max_num_seqs=32,
            max_num_batched_tokens=512, enable_prefix_caching=True, scheduling_policy="priority",
            tensor_parallel_size=a.tp, pipeline_parallel_size=a.pp, seed=0, **extra,
        )
    )  # fmt: skip
    scheduler: Any = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    counts = {"preemptions": 0, "cached_tokens": 0}
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **named: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*arguments, **named)

    scheduler._preempt_request = counted
    requests = plan(a.requests, a.longest, a.seed)
    coming = sorted(range(len(requests)), key=lambda i: requests[i]["step"])
    ends: dict[str, int] = {}
    tokens: list[list[int] | None] = [None] * len(requests)
    step = 0
    while coming or engine.has_unfinished_requests():
        while coming and requests[coming[0]]["step"] <= step:
            i = coming.pop(0)
            request = requests[i]
            if request["aborted_after"] is not None:
                ends[f"r{i}"] = step + request["aborted_after"]
            arguments = {"slo_ttft_ms": 500.0, "slo_tpot_ms": 100.0} if request["slo"] else None
            params = SamplingParams(
                temperature=0, max_tokens=request["output"], ignore_eos=True, detokenize=False, extra_args=arguments
            )
            engine.add_request(f"r{i}", {"prompt_token_ids": request["prompt"]}, params, priority=request["priority"])
        for name in [name for name, at in ends.items() if at <= step]:
            del ends[name]
            engine.abort_request([name])
        for output in engine.step():
            if output.finished and output.request_id in ends:
                del ends[output.request_id]
            elif output.finished and (reason := output.outputs[0].finish_reason) != "abort":
                assert reason == "length", reason
                tokens[int(output.request_id[1:])] = list(output.outputs[0].token_ids)
                counts["cached_tokens"] += output.num_cached_tokens or 0
        step += 1
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "tokens": tokens,
        "steps": step,
        "blocks_held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "errors": getattr(scheduler, "headway_errors", 0),
        **counts,
    }


def in_child(a: argparse.Namespace, run: str) -> dict[str, Any]:
    """Run one engine in a process of its own: vLLM's state is global."""
    out = a.json.with_suffix(f".{run.replace(':', '-')}.json")
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    ranks = a.tp * a.pp // a.nodes
    if a.tp * a.pp > 1:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    command = [sys.executable, __file__, *sys.argv[1:], "--child", run, "--child-json", str(out)]
    with contextlib.ExitStack() as nodes:
        if a.nodes > 1:
            port = free_port()
            command += ["--port", str(port)]
            for rank in range(1, a.nodes):
                nodes.enter_context(headless_node(a, rank, port, environment))
        subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@contextlib.contextmanager
def headless_node(a: argparse.Namespace, rank: int, port: int, environment: dict[str, str]) -> Iterator[None]:
    """Run the workers of another node, which meet those of the first one at `port`, until the block ends."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", a.model, "--headless", "--nnodes", a.nodes]
    words += ["--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port, "--dtype", "float32"]
    words += ["--tensor-parallel-size", a.tp, "--pipeline-parallel-size", a.pp, "--block-size", 32, "--seed", 0]
    words += ["--num-gpu-blocks-override", a.blocks, "--max-model-len", a.longest + 64, "--max-num-seqs", 32]
    words += ["--max-num-batched-tokens", 512, *([] if a.compiled else ["--enforce-eager"])]
    cores = "|".join(str(core) for core in range(rank * a.tp * a.pp // a.nodes, (rank + 1) * a.tp * a.pp // a.nodes))
    node = subprocess.Popen(
        [str(word) for word in words],
        env={**environment, "VLLM_CPU_OMP_THREADS_BIND": cores},
        start_new_session=True,
    )
    try:
        yield
    finally:
        # Its workers are processes of the same session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Greedy tokens of random requests in vLLM, stock against plugged.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--longest", type=int, default=700, help="tokens of a prompt")
    parser.add_argument("--blocks", type=int, default=48, help="of 32 tokens, in the KV pool")
    parser.add_argument("--runs", default="stock,headway:20", help="stock, stock:THRESHOLD, headway, headway:AIM_MS")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--nodes", type=int, default=1, help="nodes among which the ranks are divided")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help="not --enforce-eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-json", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        a.child_json.write_text(json.dumps(run_engine(a)))
        return 0
    a.json.parent.mkdir(parents=True, exist_ok=True)
    # So that a run which is ended takes its engine and the other nodes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = {}
    for run in a.runs.split(","):
        found[run] = in_child(a, run)
        print(run, {key: value for key, value in found[run].items() if key != "tokens"}, flush=True)
    first, *others = found
    differ = {}
    for run in others:
        pairs = list(zip(found[first]["tokens"], found[run]["tokens"], strict=True))
        both = [(i, x, y) for i, (x, y) in enumerate(pairs) if x is not None and y is not None]
        differ[run] = [i for i, x, y in both if x != y]
        print(f"{first} against {run}: {len(both)} answers compared, {len(differ[run])} differ {differ[run][:10]}")
    held = {run: result["blocks_held"] for run, result in found.items()}
    a.json.write_text(json.dumps({"differ": differ, "blocks_held": held}, indent=1))
    return 1 if any(differ.values()) or any(held.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
