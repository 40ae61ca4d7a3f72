"""The manifests of deploy/kubernetes fit Kubernetes' schemas, each other and the command line. No cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from tests.docs.test_deploy import pinned

from headway.cli.command_parser import CommandParser
from headway.cli.serve import add_cluster_arguments
from headway.runtime.cluster.cluster_file import ClusterFile, cluster_file
from headway.serving.serve_settings import ServeSettings

FILE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "cluster.yaml"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text()))


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def workloads() -> list[dict[str, Any]]:
    return [one("StatefulSet", "headway-vllm"), one("Deployment", "headway")]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(found)


def file_of_cluster() -> ClusterFile:
    return cluster_file(yaml.safe_load(one("ConfigMap", "headway-cluster")["data"]["cluster.yaml"]), "cluster.yaml")


def test_every_manifest_fits_the_schema_of_its_kind() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="not installed: make setup")
    for manifest in manifests():
        schemas.validate(manifest, schemas.latest_version(), strict=True)
    broken = one("Deployment", "headway")
    broken["spec"]["replica"] = broken["spec"].pop("replicas")
    with pytest.raises(schemas.ValidationError):
        schemas.validate(broken, schemas.latest_version(), strict=True)


def test_the_cluster_file_names_each_server_of_the_set_by_its_own_address() -> None:
    servers, service = one("StatefulSet", "headway-vllm"), one("Service", "headway-vllm")
    assert service["spec"]["clusterIP"] == "None", "else a server has no name of its own"
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    file = file_of_cluster()
    (pool,) = file.pools
    port = service["spec"]["ports"][0]["port"]
    assert [urlsplit(url).netloc for url in pool.urls] == [
        f"headway-vllm-{i}.headway-vllm:{port}" for i in range(servers["spec"]["replicas"])
    ]
    assert pool.backend == "vllm"
    assert file.combination.refusal() is None


def test_selectors_find_the_pods_and_ports_have_their_names() -> None:
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in workloads()}
    ports = {each["metadata"]["name"]: {port["name"] for port in container(each)["ports"]} for each in workloads()}
    for workload in workloads():
        assert workload["spec"]["selector"]["matchLabels"] == labels[workload["metadata"]["name"]]
    for name in labels:
        service = one("Service", name)
        assert service["spec"]["selector"] == labels[name]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[name]
    policy = one("NetworkPolicy", "headway-vllm")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels["headway-vllm"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == labels["headway"]


def test_images_are_pinned_probes_are_of_named_ports_and_mounts_are_of_volumes() -> None:
    for workload in workloads():
        spec, found = workload["spec"]["template"]["spec"], container(workload)
        assert pinned(found["image"])
        names = {port["name"] for port in found["ports"]}
        probes = [found[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in found]
        assert len(probes) >= 2
        assert all(probe["httpGet"]["port"] in names for probe in probes)
        assert {mount["name"] for mount in found["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_the_controller_starts_what_cluster_takes_with_keys_and_time_to_drain() -> None:
    workload = one("Deployment", "headway")
    found, spec = container(workload), workload["spec"]["template"]["spec"]
    parser = CommandParser(prog="headway cluster")
    add_cluster_arguments(parser)
    assert found["command"][:2] == ["headway", "cluster"]
    arguments = parser.parse_args(found["command"][2:])
    mount = next(each for each in found["volumeMounts"] if each["name"] == "cluster")
    assert str(arguments.file) == f"{mount['mountPath']}/{next(iter(one('ConfigMap', 'headway-cluster')['data']))}"
    drain_s = ServeSettings().drain_timeout_s  # type: ignore[call-arg]
    assert drain_s is not None
    assert spec["terminationGracePeriodSeconds"] > drain_s
    assert spec["securityContext"]["runAsNonRoot"]
    assert workload["spec"]["replicas"] == 1
    names = {each["name"] for each in found["env"]}
    assert names == {"HEADWAY_API_KEY", "HEADWAY_ADMIN_KEY", "HEADWAY_INSTANCE_API_KEY"}
    # one secret, whose creation the file's head shows with all of its keys
    head = FILE.read_text().partition("apiVersion")[0]
    for workload in workloads():
        for variable in container(workload)["env"]:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert f"secret generic {reference['name']}" in head
            assert f"--from-literal={reference['key']}=" in head


def test_the_controller_waits_for_a_server_that_its_file_names() -> None:
    (wait,) = one("Deployment", "headway")["spec"]["template"]["spec"]["initContainers"]
    code = wait["command"][-1]
    compile(code, "wait", "exec")
    assert any(f'"{url}/health"' in code for url in file_of_cluster().pools[0].urls)
    assert wait["image"] == container(one("Deployment", "headway"))["image"]


def test_both_read_the_checkpoint_from_where_the_cluster_file_says() -> None:
    model = str(file_of_cluster().model)
    for workload in workloads():
        mount = next(each for each in container(workload)["volumeMounts"] if each["name"] == "models")
        assert model.startswith(f"{mount['mountPath']}/")
        assert mount["readOnly"]
    assert container(one("StatefulSet", "headway-vllm"))["args"][0] == model
