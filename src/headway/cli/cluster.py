"""`headway cluster cluster.yaml`: several engines behind one OpenAI endpoint, and a placement policy between."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from headway.cli import serve_options
from headway.cli.options import add_options, combine, environment, read_yaml
from headway.cli.serve import model_folder
from headway.core.errors import ConfigError, RequestError
from headway.engine.config import EngineConfig
from headway.engine.numerics import settle
from headway.router.cluster_file import ClusterFile, cluster_file, model_of, moves_kv, nodes_of
from headway.router.instance import seen

if TYPE_CHECKING:
    from headway.engine.protocol import EngineInfo
    from headway.hardware.shapes import ModelShape
    from headway.placement.base import Placement
    from headway.placement.registry import Surroundings
    from headway.placement.view import Links
    from headway.router.client import Rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a YAML file such as examples/cluster.yaml; docs/live-cluster.md")
    parser.add_argument(
        "--dry-run", action="store_true", help="load one instance of each pool, print what fits, and exit"
    )
    parser.add_argument(
        "--replay", metavar="LOG", type=Path, help="decide again what --event-log LOG tells, say whether it is the same"
    )
    parser.add_argument(
        "--allow-public", action="store_true", help="listen on an address other than loopback without an API key"
    )
    add_options(parser, serve_options.ALL)


def run(arguments: argparse.Namespace) -> int:
    where = str(arguments.file)
    data = read_yaml(where)
    file = cluster_file(data, where)
    values, given = combine(serve_options.ALL, arguments, environment(), file.serve, f"{where}: serve")
    model = model_folder(model_of(file, arguments.file.parent))
    configs = instance_configs(file, where, model, values, given)
    settings = serve_options.server_settings(values)
    if arguments.dry_run:
        settle()
        print(_report(file, model, configs))
        return 0
    if arguments.replay is not None:
        return _replay(file, model, arguments.replay)
    from headway.server.binding import check_binding

    check_binding(settings.host, settings.api_key, arguments.allow_public)

    from headway.core.scratch import ScratchFolder
    from headway.router.client import ClusterClient
    from headway.router.instance import LiveInstance
    from headway.router.launch import launcher

    log = open_log(values["event_log"])
    folder = ScratchFolder("headway-cluster-")
    first = first_of(file)

    def another(number: int, pool: int, incarnation: int) -> LiveInstance:
        if not 0 <= pool < len(file.pools):
            raise RequestError(f"pool must be between 0 and {len(file.pools) - 1}, not {pool}", "pool")
        node = nodes_of(file)[first[pool]]
        launch = launcher(number, folder.path)
        config = joining(configs[first[pool]], first[pool], number, incarnation)
        return LiveInstance(number, file.pools[pool].role, node, pool, config, launch, incarnation)

    instances: list[LiveInstance] = []
    try:
        for number, (node, config) in enumerate(zip(nodes_of(file), configs, strict=True)):
            pool = max(i for i, start in enumerate(first) if start <= number)
            launch = launcher(number, folder.path)
            instances.append(LiveInstance(number, file.pools[pool].role, node, pool, config, launch))
        from headway.server.app import create_app
        from headway.server.run import serve
        from headway.server.tokenizer import Tokenizer

        client = ClusterClient(
            instances,
            _links(),
            lambda infos: _rules(file, model, infos, log),
            placement=file.placement,
            another=another,
            backends=file.backends,
            in_place=file.group_decode == "in-place",
        )
        app = create_app(client, Tokenizer.load(Path(model)), settings)
        started = serve(app, settings, force_binding=arguments.allow_public)
        instances = list(client.fleet)
    finally:
        for each in instances:
            each.end()
        folder.close()
    if client.failure is not None:
        raise ConfigError(client.failure)
    return 0 if started else 1


def first_of(file: ClusterFile) -> list[int]:
    """The number of each pool's first instance."""
    counts = [pool.count for pool in file.pools]
    return [sum(counts[:i]) for i in range(len(counts))]


def instance_configs(
    file: ClusterFile, where: str, model: str, values: dict[str, Any], given: set[str]
) -> list[EngineConfig]:
    """One engine's settings for each instance. Cores and memory that nobody has shared out are shared equally."""
    count = sum(pool.count for pool in file.pools)
    configs: list[EngineConfig] = []
    for i, pool in enumerate(file.pools):
        own, named = combine(serve_options.ALL, argparse.Namespace(), {}, pool.serve, f"{where}: pools[{i}].serve")
        mine = {**values, **{name: own[name] for name in named}}
        if mine["nnodes"] > 1:
            raise ConfigError(f"{where}: the instances of a cluster run on this host: nnodes must be 1")
        made = serve_options.engine_config(model, mine, given | named)
        workers = made.tensor_parallel_size * made.pipeline_parallel_size * made.kv_parallel_size
        if workers > 1 and (moves_kv(file) or pool.role != "mixed"):
            raise ConfigError(
                f"{where}: pools[{i}] is of instances of several processes (tensor-, pipeline- or kv-parallel-size "
                "above 1): these serve whole requests, of role mixed, under jsq, or under fifo, priority or "
                "reservation with `long_sp: 1`"
            )
        threads = made.threads or max(1, len(os.sched_getaffinity(0)) // (count * workers))
        for _ in range(pool.count):
            log = made.event_log and f"{made.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(made, threads=threads, memory_share=1.0 / count, event_log=log))
    return configs


def joining(config: EngineConfig, like: int, number: int, incarnation: int) -> EngineConfig:
    """The settings of instance `like` for one that joins: its log is its own, and those before it keep theirs."""
    if config.event_log is None:
        return config
    log = f"{config.event_log.removesuffix(f'.{like}')}.{number}" + (f".{incarnation}" if incarnation else "")
    return msgspec.structs.replace(config, event_log=log)


def _links() -> Links:
    from headway.hardware.links import Link
    from headway.placement.view import Links

    host = Link(name="host", bytes_per_s=2e9, latency_s=1e-4, source="assumed: a socket between processes of one host")
    return Links(inside=host, across=host)


def open_log(path: str | None) -> IO[bytes] | None:
    """Where the router's decisions are written; those of instances go to FILE.0, FILE.1 and so on."""
    try:
        return None if path is None else open(path, "wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"event-log: {error}") from error


def sink(log: IO[bytes]) -> Callable[[bytes], None]:
    """Writes lines. A log that cannot be written any more (a full disk, say) ends there: the cluster goes on."""
    failed = False

    def write(line: bytes) -> None:
        nonlocal failed
        if failed:
            return
        try:
            log.write(line)
        except OSError as error:
            failed = True
            logging.getLogger("headway.router").error("the event log ends here: %s", error)

    return write


def _rules(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: IO[bytes] | None = None) -> Rules:
    """The policy, told what the first engine has measured."""
    from headway.router.client import Rules
    from headway.router.live import DecisionLog

    surroundings = _surroundings(model, infos[0].latency)
    about = {"placement": file.placement, "options": file.options, "latency": infos[0].latency}
    return Rules(
        policy=_policies(file, surroundings),
        latency=surroundings.latency,
        shape=surroundings.shape,
        log=None if log is None else DecisionLog(sink(log), about),
    )


def _policies(file: ClusterFile, surroundings: Surroundings) -> Callable[[], Placement]:
    from headway.placement.registry import make_placement

    return lambda: make_placement(file.placement, surroundings, file.options)


def _surroundings(model: str, latency: Mapping[str, Any] | None) -> Surroundings:
    from headway.latency.recorded import restore
    from headway.latency.ring import RingLatency
    from headway.placement.registry import Surroundings

    shape, links = _shape(model), _links()
    table, _ = restore(latency)
    return Surroundings(latency=RingLatency(table, shape, links.inside, links.across), shape=shape)


def _replay(file: ClusterFile, model: str, path: Path) -> int:
    """Drive the machine and the policy from a log; 1 where they decide otherwise than they did."""
    from headway.cluster.replay import Replay
    from headway.router.policies import Policies, may_of

    made: list[Policies] = []

    def make(replay: Replay) -> Policies:
        about = replay.about or {}
        if (about.get("placement"), about.get("options")) != (file.placement, file.options):
            raise ConfigError(f"{path} is of placement {about.get('placement')!r} with options {about.get('options')}")
        made.append(Policies(_policies(file, _surroundings(model, about["latency"])), may_of(replay.machine)))
        return made[0]

    def noted(word: str) -> None:
        if word == "renew":
            made[0].renew()
        elif word == "taken":
            made[0].stranded.clear()

    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"replay: {error}") from error
    try:
        replay = Replay(lines, make, noted)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"replay: {path} has a line that is not of a cluster's log: {error}") from None
    difference = replay.run()
    print(f"{replay.decisions} decisions, all as recorded" if difference is None else str(difference))
    return 0 if difference is None else 1


def _shape(model: str) -> ModelShape:
    from headway.hardware.models import from_hf_config

    return from_hf_config(json.loads((Path(model) / "config.json").read_text()))


def _report(file: ClusterFile, model: str, configs: list[EngineConfig]) -> str:
    """Loads one instance of each pool, one after another."""
    from headway.cli import cluster_report
    from headway.cli.dry_run import described, loaded
    from headway.latency.recorded import describe

    lines, cores = [f"placement            {file.placement}, {len(configs)} instances"], []
    for i, (pool, first) in enumerate(zip(file.pools, first_of(file), strict=True)):
        lines += ["", f"pool {i}: {pool.count} x {pool.role}, {configs[first].threads} threads each"]
        core = loaded(configs[first])
        lines += described(core)
        cores += [core] * pool.count
    infos = [msgspec.structs.replace(core.info, latency=describe(core.scheduler.latency)) for core in cores]
    rules = _rules(file, model, infos)
    roles = [pool.role for pool in file.pools for _ in range(pool.count)]
    seats = zip(nodes_of(file), roles, configs, infos, strict=True)
    instances = [
        seen(i, node, role, config, info.kv_tokens_total) for i, (node, role, config, info) in enumerate(seats)
    ]
    plan = cluster_report.Plan(rules, instances, _links(), cores, file.backends)
    return "\n".join([*lines, "", *cluster_report.groups(plan), "", *cluster_report.capacity(plan)])
