"""`headway watch LOG`: the live page of an event log, served on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        help="event log of `headway serve`, `cluster` or `simulate` (--event-log), or of the vLLM plug-in",
    )
    parser.add_argument("--port", type=int, default=8010, help="port on 127.0.0.1; 0 picks a free one (default: 8010)")


def run(arguments: argparse.Namespace) -> int:
    import sys

    from headway.cli.trace import of_an_engine
    from headway.core.machine import check_port
    from headway.serving.live.watch import ClusterRecording, EngineRecording, serve
    from headway.sim.cluster_log import is_cluster_log, read_cluster
    from headway.sim.replay import read_log, replay

    check_port(arguments.port)
    if is_cluster_log(arguments.log):
        serve(ClusterRecording(read_cluster(arguments.log)), arguments.log.name, arguments.port)
        return 0
    run = replay(of_an_engine(read_log(arguments.log), arguments.log), detail=True)
    if run.differences:
        # What the log says itself still holds; which requests decoded in an iteration comes from the replay.
        print(f"this version decides otherwise than the recorded run: {run.differences[0]}", file=sys.stderr)
    serve(EngineRecording(run), arguments.log.name, arguments.port)
    return 0
