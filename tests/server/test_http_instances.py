"""Endpoints and metrics of a cluster's instances, over a fake engine that is an `InstanceAdmin`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.helpers.fake_engine import FakeEngine
from tests.server.fake_cluster import FakeClusterEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> FakeClusterEngine:
    return FakeClusterEngine()


async def test_instances_are_listed_join_and_leave(connect: Any, engine: FakeClusterEngine) -> None:
    async with connect() as client:
        listed = (await client.get("/v1/cluster")).json()
        assert (listed["schema"], listed["transfers"]) == ("headway.cluster/1", 2)
        assert [(each["id"], each["state"], each["failure"]) for each in listed["instances"]] == [
            (0, "ready", None),
            (1, "failed", "no memory"),
        ]
        assert (await client.get("/v1/cluster/instances/1")).json()["role"] == "decode"
        for missing in ("2", "x", "1e3", "-1", "9" * 30, "01", "00", "%D9%A1", "%C2%B9"):
            assert (await client.get(f"/v1/cluster/instances/{missing}")).status_code == 404
            assert (await client.delete(f"/v1/cluster/instances/{missing}")).status_code == 404
        assert engine.left is None
        assert (await client.delete("/v1/cluster/instances/1")).status_code == 202
        assert engine.left == 1
        joined = await client.post("/v1/cluster/instances", json={"pool": 0})
        assert (joined.status_code, joined.json()["state"]) == (202, "starting")
        assert (await client.post("/v1/cluster/instances")).status_code == 202


async def test_a_join_body_without_a_valid_pool_is_refused(connect: Any) -> None:
    async with connect() as client:
        for body, status in (
            (b'{"pool": 1}', 400),
            (b'{"pool": "0"}', 400),
            (b'{"pol": 0}', 400),
            (b"[", 400),
            (b" " * 5000, 413),
        ):
            answer = await client.post("/v1/cluster/instances", content=body)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]


async def test_improvement_rates_are_replaced_while_the_cluster_serves(connect: Any, engine: FakeClusterEngine) -> None:
    async with connect() as client:
        answer = await client.put("/v1/cluster/rates", json={"points": [[0.5, 0.1], [2.0, 0.4]], "source": "tonight"})
        assert answer.status_code == 200
        assert answer.json()["points"] == [[0.5, 0.1], [2.0, 0.4]]
        assert engine.rates is not None
        assert engine.rates.at(3.0) == 0.4
        for body, status in (
            (b'{"points": []}', 400),
            (b'{"points": [[1, 2]]}', 400),
            (b"[", 400),
            (b" " * 70_000, 413),
        ):
            refused = await client.put("/v1/cluster/rates", content=body)
            assert refused.status_code == status, refused.text
        form = await client.put("/v1/cluster/rates", content=b"points=1", headers={"content-type": "text/plain"})
        assert form.status_code == 415
        assert engine.rates.source == "tonight"


def test_instance_endpoints_need_a_cluster(live: Any) -> None:
    with live(FakeEngine()) as url:
        assert httpx.get(f"{url}/v1/cluster").status_code == 404
        assert httpx.put(f"{url}/v1/cluster/rates", json={"points": [[1, 0.1]]}).status_code == 404
        assert "headway_instance" not in httpx.get(f"{url}/metrics").text


async def test_metrics_are_labelled_by_instance(connect: Any) -> None:
    async with connect() as client:
        text = (await client.get("/metrics")).text
    label = 'engine="0",instance="{}",model_name="fake-model",node="1",role="{}"'
    assert f"headway_instance_up{{{label.format(0, 'prefill')}}} 1.0" in text
    assert f"headway_instance_up{{{label.format(1, 'decode')}}} 0.0" in text
    assert f"headway_instance_restarts_total{{{label.format(0, 'prefill')}}} 3.0" in text
    assert f"headway_instance_queued_tokens{{{label.format(0, 'prefill')}}} 77.0" in text
