"""A host of a cluster that runs fake engines, as a process: `headway cluster --node-rank R` without a checkpoint.

usage: python -m tests.helpers.host_agent_process PORT NODE MODEL FOLDER
"""

from __future__ import annotations

import signal
import sys

from headway.runtime.launcher.engine_starter import EngineLauncher
from headway.runtime.launcher.host_agent import HostAgent
from headway.runtime.launcher.host_compatibility import cluster_terms
from headway.runtime.launcher.network import HostEndpoint

TOKEN = "what-all-hosts-share"
NODES = 3


def main(port: int, node: int, model: str, folder: str) -> None:
    mine = cluster_terms(node, NODES, folder)
    engines = EngineLauncher(model, "127.0.0.1", "tests.helpers.fake_engine_process")
    host = HostAgent(HostEndpoint("127.0.0.1", port), TOKEN, mine, engines, 20.0)
    signal.signal(signal.SIGTERM, lambda *_: host.end())
    host.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
