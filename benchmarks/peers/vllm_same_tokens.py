"""Does Headway inside vLLM change what is generated? Greedy tokens of random requests, stock against plugged.

python benchmarks/peers/vllm_same_tokens.py --model out/reference-fp32 --python .venv-vllm/bin/python \
    --requests 64 --json out/same_tokens.json

Prompts of 1 to `--longest` tokens come at random moments; a third share a prefix, and some are dropped half-way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import flags_of, vllm_server

HEADERS = {"x-llm-d-slo-ttft-ms": "2000", "x-llm-d-slo-tpot-ms": "500"}


def plan(count: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """The requests: when, which tokens, how many to generate, and whether the client leaves."""
    chance = random.Random(seed)
    shared = [chance.randrange(10, 4000) for _ in range(longest // 2)]
    requests = []
    for i in range(count):
        length = int(longest ** chance.uniform(0.2, 1.0))
        prompt = [chance.randrange(10, 4000) for _ in range(max(1, length))]
        if i % 3 == 0:
            prompt = (shared + prompt)[:longest]
        requests.append(
            {
                "at_s": chance.uniform(0, count * 0.15),
                "prompt": prompt,
                "output": chance.randrange(1, 24),
                "leaves": chance.random() < 0.1,
                "slo": chance.random() < 0.5,
            }
        )
    return requests


async def answers(url: str, requests: list[dict[str, Any]]) -> list[list[int] | None]:
    """Generated token ids by request; None where the client left."""
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(request: dict[str, Any]) -> list[int] | None:
            await asyncio.sleep(request["at_s"])
            body = {
                "model": "peer", "prompt": request["prompt"], "max_tokens": request["output"], "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            call = session.post(f"{url}/v1/completions", json=body, headers=HEADERS if request["slo"] else {})
            if request["leaves"]:
                try:
                    async with asyncio.timeout(0.5):
                        async with call as response:
                            await response.read()
                except TimeoutError:
                    pass
                return None
            async with call as response:
                answer = await response.json()
                if response.status != 200:
                    raise SystemExit(f"{response.status}: {answer}")
                tokens: list[int] = answer["choices"][0]["token_ids"]
                return tokens

        return list(await asyncio.gather(*map(one, requests)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Greedy tokens of vLLM, stock against plugged.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--runs", default="default,headway:120")
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of the server (default: all cores)")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    a.json.parent.mkdir(parents=True, exist_ok=True)
    requests = plan(a.requests, a.longest, a.seed)
    found = {}
    for run in a.runs.split(","):
        flags = [*flags_of(run), *(["--enforce-eager"] if a.eager else [])]
        log = a.json.with_suffix(f".{run.replace(':', '-')}.log")
        with vllm_server(
            a.python,
            a.model,
            flags,
            dtype="float32",
            max_model_len=a.longest + 256,
            kv_gib=a.kv_gib,
            threads=a.threads,
            log=log,
        ) as url:
            print(f"{run}: ready", flush=True)
            found[run] = asyncio.run(answers(url, requests))
    first, *others = found
    differ = {
        run: [i for i, (x, y) in enumerate(zip(found[first], found[run], strict=True)) if x != y] for run in others
    }
    compared = sum(tokens is not None for tokens in found[first])
    a.json.write_text(json.dumps({"compared": compared, "differ": differ}, indent=1))
    for run, indices in differ.items():
        print(f"{first} against {run}: {compared} answers, {len(indices)} differ {indices[:10]}")
    return 1 if any(differ.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
