"""A Ray cluster of several nodes on this machine (`ray.cluster_utils.Cluster`), driven by lines on standard input.

`add` adds a node, `kill` kills the newest one but the head with all its processes at once; each is answered by a line.
The first line printed is the cluster's address. Ends, and ends all nodes, with standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def kill(cluster: Any, node: Any) -> None:
    """As when its power fails: first everything stands still, then it is gone."""
    raylets = node.live_processes()
    pids = [process.pid for _, process in raylets]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in [*pids, *(child for pid in pids for child in descendants(pid))]:
            with suppress(ProcessLookupError):
                os.kill(each, number)
    cluster.remove_node(node, allow_graceful=False)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=dict(SMALL))
    nodes = []
    try:
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "add":
                nodes.append(cluster.add_node(num_cpus=2, object_store_memory=80 << 20))
            else:
                kill(cluster, nodes.pop())
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
