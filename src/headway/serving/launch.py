"""Composition of a service, from settings to a served endpoint, and the folder of the checkpoint that a
command names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError
from headway.core.files import ScratchFolder
from headway.core.logs import LogSink, setup
from headway.runtime.engine.config import HOST_TIMEOUT_S, EngineConfig
from headway.runtime.engine.protocol import EngineClient
from headway.serving.serve_settings import ServeSettings
from headway.serving.settings import ServerSettings, bind, check_binding, release

if TYPE_CHECKING:
    from headway.runtime.assembly.cluster import InstanceFactory
    from headway.runtime.cluster.cluster_file import ClusterFile
    from headway.runtime.cluster.instances import LiveInstance
    from headway.runtime.launcher.ray_hosts import RayHosts
    from headway.serving.tokenizer import ModelTokenizer


def serve_model(config: EngineConfig, settings: ServerSettings, *, allow_public: bool) -> int:
    """Serve one engine until a signal; return the exit status. Raises ConfigError when it cannot start."""
    with _bound(settings, allow_public) as sockets:
        from headway.runtime.engine.client import ProcessEngineClient

        client: ProcessEngineClient | None = None
        try:
            client = ProcessEngineClient(config)  # the engine loads while this process imports the server
            explained = settings.model_copy(update={"event_log": config.event_log})
            started = _serve(client, config.model, explained, sockets, allow_public)
        finally:
            # Before ending the engine, which takes a while: new connections are refused instead of left waiting.
            release(sockets)
            if client is not None:
                client.end()
    return _exit_status(client.failure, started)


def serve_cluster(file: ClusterFile, where: str, model: str, settings: ServeSettings, *, allow_public: bool) -> int:
    """Serve the instances of a cluster file until a signal; return the exit status.

    where: the file's name in errors; model: the checkpoint's folder; settings: the file's `serve` section.
    Raises ConfigError when the cluster cannot start.
    """
    server = settings.server_settings()
    with _bound(server, allow_public) as sockets:
        # Here: a single engine starts sooner without them.
        from headway.runtime.assembly import cluster
        from headway.runtime.cluster.client import ClusterClient
        from headway.serving.serve_settings import instance_configs, shared_cores

        # of the controller's decisions; instances write their own logs to FILE.0, FILE.1 and so on
        log = None if settings.event_log is None else LogSink(settings.event_log)
        # Host of each instance by number: filled by the factory.
        host_of: dict[int, int] = {}
        instances: list[LiveInstance] = []
        client: ClusterClient | None = None
        factory: InstanceFactory | None = None
        folder = ScratchFolder("headway-cluster-")
        hosts = _open_hosts(file, model, settings, host_of)
        try:
            cores = [] if hosts is None else [host.cores for host in hosts.gather()]
            configs = instance_configs(file, where, model, settings, cores)
            for warning in shared_cores(file, configs):
                logging.getLogger("headway.cluster").warning("%s", warning)
            factory = cluster.InstanceFactory(file, configs, folder.path, host_of, hosts)
            instances = factory.start_all()
            client = ClusterClient(
                instances,
                cluster.links(file),
                lambda infos: cluster.live_rules(file, model, infos, log),
                placement=file.placement,
                another=factory.start_another,
                backends=file.backends,
                in_place=file.in_place,
            )
            started = _serve(client, model, server, sockets, allow_public)
        finally:
            # The client's include instances that joined while serving.
            for each in instances if client is None else client.registry:
                each.end()
            if factory is not None:
                factory.close()
            if hosts is not None:
                hosts.close()
            folder.close()
    return _exit_status(client.failure, started)


def serve_http_cluster(
    file: ClusterFile, model: str, settings: ServerSettings, *, api_key: str | None, allow_public: bool
) -> int:
    """Serve a cluster of servers with vLLM's HTTP API until a signal; return the exit status.

    model: the checkpoint's folder; api_key: sent to the instances. Raises ConfigError when the cluster cannot start.
    """
    with _bound(settings, allow_public) as sockets:
        from headway.runtime.assembly.cluster import http_cluster
        from headway.vllm.latency import EngineFacts, machine_rates

        # Where they compute is not known: the rates are this processor's until each instance has been measured.
        rates = machine_rates(EngineFacts(hf_config={}, dtype_bytes=4, device_name="cpu"))
        folder = ScratchFolder("headway-cluster-")
        try:
            client = http_cluster(file, model, folder.path, rates, api_key)
            started = _serve(client, model, settings, sockets, allow_public)
        finally:
            folder.close()
    return _exit_status(client.failure, started)


@contextmanager
def _bound(settings: ServerSettings, allow_public: bool) -> Iterator[list[socket]]:
    """Bind the settings' address for the duration of the context.

    Called before anything is loaded, so that an address in use is an error at once. Raises ConfigError.
    """
    check_binding(settings.host, settings.api_key, allow_public)
    sockets = bind(settings.host, settings.port)
    try:
        yield sockets
    finally:
        release(sockets)


def _serve(
    client: EngineClient, model: str, settings: ServerSettings, sockets: list[socket], allow_public: bool
) -> bool:
    from headway.runtime.launcher.standby import discard_early
    from headway.serving.app import create_app
    from headway.serving.run import serve

    discard_early()
    # Before the journal is opened, which may have something to log.
    setup(settings.log_level, settings.log_format)
    app = create_app(client, load_tokenizer(model, settings), settings)
    return serve(app, settings, force_binding=allow_public, sockets=sockets)


def load_tokenizer(model: str, settings: ServerSettings) -> ModelTokenizer:
    """Load a served checkpoint's tokenizer with the settings' chat template. Raises ConfigError."""
    from headway.serving.text import DEFAULT_TEMPLATE
    from headway.serving.tokenizer import ModelTokenizer

    memory, template = settings.tokenizer_memory, settings.chat_template
    return ModelTokenizer.load(Path(model), chat_template=template, memory=memory, default_template=DEFAULT_TEMPLATE)


def _open_hosts(file: ClusterFile, model: str, settings: ServeSettings, host_of: dict[int, int]) -> RayHosts | None:
    """Join the Ray cluster whose nodes are the file's other hosts; None where the file names none."""
    count = max(file.hosts) + 1
    if count == 1:
        return None
    from headway.runtime.launcher.ray_hosts import join_ray

    assert settings.ray_address is not None
    return join_ray(settings.ray_address, count, host_of.__getitem__, model, HOST_TIMEOUT_S)


def _exit_status(failure: str | None, started: bool) -> int:
    if failure is not None:
        raise ConfigError(failure)
    return 0 if started else 1


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9][\w-]*")
"""`organisation/name`, or a bare name."""


def model_folder(named: str | None, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the checkpoint folder to serve; None and `headway-embedded` mean the embedded one. Nothing is downloaded.

    revision: branch, tag or commit of a hub id, by default `main`; download_dir: the hub cache, by default that of the
    environment (HF_HUB_CACHE, HF_HOME). Raises ConfigError when there is no such folder.
    """
    from headway.runtime.embedded import MODEL_NAME, model_path

    if named is not None and Path(named).is_dir():
        return named
    if named is None or named == MODEL_NAME:
        return str(model_path())
    if not _HUB_ID.fullmatch(named):
        raise ConfigError(
            f"{named} is not a folder: give the folder of a Hugging Face checkpoint (config.json, *.safetensors)"
        )
    found = _cached(named, revision, download_dir)
    if found is None:
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{named} is neither a folder nor a model in the local hub cache{at}, and nothing is downloaded here: "
            f"run `hf download {named}{f' --revision {revision}' if revision else ''}`, or give the checkpoint's folder"
        )
    return str(found)


def _cached(named: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a hub id's files, all or some, in the local hub cache; None where there are none."""
    # The library is a dependency of `tokenizers`.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(named, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def is_hub_id(named: str | None) -> bool:
    """Return whether `named` is to be looked up in the hub cache."""
    return named is not None and _HUB_ID.fullmatch(named) is not None and not Path(named).exists()
