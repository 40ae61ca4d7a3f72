"""Speed and memory of the prefix index: `python -m benchmarks.prefix_index`. CPU time of one process, best of rounds.

Documents of 2,048 blocks (128K tokens in blocks of 64) fill an index to a million blocks: insertion, look-up of whole
prefixes, eviction of all. Keys are 16 bytes, as served. Hashing is reported apart: it happens once a request.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc

import numpy as np

from headway.kv.eviction import CostAware, EvictionPolicy, LeastRecentlyUsed
from headway.kv.prefix_index import PrefixIndex
from headway.kv.text_keys import block_keys
from headway.serving.load.machine import machine

DOCUMENT = 2048
BLOCK_TOKENS = 64


def documents(blocks: int) -> list[list[bytes]]:
    """Return the keys of random documents of `DOCUMENT` blocks, `blocks` in all."""
    raw = np.random.default_rng(0).bytes(16 * blocks)
    keys = [raw[i : i + 16] for i in range(0, len(raw), 16)]
    return [keys[i : i + DOCUMENT] for i in range(0, blocks, DOCUMENT)]


def measure(eviction: EvictionPolicy, prompts: list[list[bytes]]) -> dict[str, float]:
    """Return blocks/s of inserting, finding, holding and evicting all blocks."""
    index = PrefixIndex(eviction)
    blocks = sum(map(len, prompts))
    numbers = range(blocks)
    times = [time.process_time()]
    at = 0
    for keys in prompts:
        index.extend(index.root, keys, numbers[at : at + len(keys)])
        at += len(keys)
    times.append(time.process_time())
    found = [index.match(keys) for keys in prompts]
    times.append(time.process_time())
    assert all(node.depth == len(keys) for node, keys in zip(found, prompts, strict=True))
    for node in found:
        index.acquire(node)
    for node in found:
        index.release(node)
    times.append(time.process_time())
    while index.evict() is not None:
        pass
    times.append(time.process_time())
    names = ("insert", "look_up", "acquire_release", "evict")
    return {name: blocks / (times[i + 1] - times[i]) for i, name in enumerate(names)}


def bytes_per_block(prompts: list[list[bytes]]) -> float:
    """Return the memory of the index for each block: node and place in the table; keys and numbers are the caller's."""
    index = PrefixIndex(LeastRecentlyUsed())
    tracemalloc.start()
    for keys in prompts:
        index.extend(index.root, keys, [0] * len(keys))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(index)


def hash_rate(blocks: int) -> float:
    """Return blocks/s of `block_keys`."""
    ids = np.random.default_rng(1).integers(0, 32_000, blocks * BLOCK_TOKENS).astype(np.int32).tobytes()
    began = time.process_time()
    block_keys(ids, BLOCK_TOKENS)
    return blocks / (time.process_time() - began)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prompts = documents(arguments.blocks)
    result: dict[str, object] = {"machine": machine(), "blocks": arguments.blocks}
    for make in (LeastRecentlyUsed, lambda: CostAware(lambda depth: 1e-3 + 1e-6 * depth)):
        rounds = [measure(make(), prompts) for _ in range(arguments.rounds)]
        best = {name: max(one[name] for one in rounds) for name in rounds[0]}
        result[make().name] = best
    result["hash"] = hash_rate(min(arguments.blocks, 1 << 18))
    result["bytes_per_block"] = bytes_per_block(prompts[:64])
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{arguments.blocks:,} blocks in documents of {DOCUMENT}; 10^6 blocks/s")
    for policy in ("lru", "cost"):
        rates = result[policy]
        assert isinstance(rates, dict)
        print(f"{policy:>5}  " + "  ".join(f"{name} {rate / 1e6:.2f}" for name, rate in rates.items()))
    print(f" hash  {float(str(result['hash'])) / 1e6:.2f} (blocks of {BLOCK_TOKENS} tokens)")
    print(f"       {float(str(result['bytes_per_block'])):.0f} bytes a block, beside its key")


if __name__ == "__main__":
    main()
