"""Replays a recorded live run (`headway serve --event-log FILE`) and says how far predictions are from measurements."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="an event log of `headway serve --event-log`, or of the vLLM plug-in")
    parser.add_argument(
        "--corrected",
        action="store_true",
        help="simulate with the profile as the run's iterations correct it (default: as it was at the start)",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the profile as the run's iterations show it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON")


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headway.sim.calibration import calibrate
    from headway.sim.replay import engine_log, replay
    from headway.sim.report.tables import calibration_report, show

    replayed = replay(engine_log(arguments.log))
    result = calibrate(replayed, arguments.corrected)
    # Replay decides every batch again: a difference means other code or another profile than the recorded run's.
    for line in replayed.differences:
        print(f"a decision differs: {line}")
    print(f"{len(replayed.batches)} iterations replayed, {len(replayed.differences) or 'no'} decisions differ")
    show(calibration_report(result.to_json()))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result.to_json()), indent=1))
    if arguments.save is not None:
        from headway.perf.latency import table
        from headway.serving.load.calibration import learned_table, overhead_of

        source, _ = learned_table(replayed.table.source, replayed)
        serving = overhead_of(replayed, ())
        if source.serving is not None:
            # What clients saw is not in the log.
            seen = serving.with_way_of(source.serving) if source.serving.request_s else serving
            woken = sum(each.woken_s is not None for each in replayed.batches)
            serving = seen.with_unmeasured_of(source.serving, woken)
        table.save(msgspec.structs.replace(source, serving=serving), arguments.save)
    return 1 if replayed.differences else 0
