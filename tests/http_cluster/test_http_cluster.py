"""A cluster of servers behind HTTP: one answer whatever happens to them, and work that ends with its client."""

from __future__ import annotations

import asyncio
import random
from array import array
from contextlib import aclosing

import pytest
from tests.helpers.polling import eventually
from tests.http_cluster.http_world import ask, cluster_of, request, server_of, stream
from tests.http_cluster.token_server import TokenServer, greedy

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.core.request import Slo
from headway.kv.text_keys import TextKeys
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.instances import AssumedKeys

PROMPT = [5, 9, 200, 31]
DOCUMENT = [2 + i % 250 for i in range(400)]


def resume(servers: list[TokenServer]) -> None:
    for server in servers:
        server.pause_at = None


async def test_requests_are_spread_and_answered_as_by_one_server() -> None:
    servers = [TokenServer(gap_s=0.001), TokenServer(gap_s=0.001)]
    async with cluster_of(servers) as cluster:
        answers = await asyncio.gather(*(ask(cluster, f"r{i}", [i + 2, 3, 4], 20) for i in range(12)))
        assert answers == [greedy([i + 2, 3, 4], 20) for i in range(12)]
        assert all(len(server.seen) >= 3 for server in servers)
        assert cluster.info.max_model_len == 4096
        assert cluster.info.kv_tokens_total == 2 * 16384


async def test_an_answer_goes_on_elsewhere_when_its_stream_breaks_off() -> None:
    servers = [TokenServer(break_after=6), TokenServer()]
    async with cluster_of(servers) as cluster:
        assert await ask(cluster, "r", PROMPT, 15) == greedy(PROMPT, 15)
        again = servers[1].seen[0] if servers[1].seen else servers[0].seen[1]
        assert again.body["prompt"] == PROMPT + greedy(PROMPT, 6)
        assert again.body["max_tokens"] == 9


@pytest.mark.parametrize("placement", ["jsq", "ladder"])
async def test_a_killed_server_costs_no_answer_and_serves_again_when_it_is_back(placement: str) -> None:
    servers = [TokenServer(pause_at=5), TokenServer(pause_at=5)]
    async with cluster_of(servers, placement) as cluster:
        asked = [asyncio.create_task(ask(cluster, f"r{i}", [i + 2, 3], 40)) for i in range(8)]
        await eventually(lambda: sum(server.running for server in servers) == 8)
        await servers[0].stop()
        resume(servers)
        assert await asyncio.gather(*asked) == [greedy([i + 2, 3], 40) for i in range(8)]
        await eventually(lambda: cluster.registry[0].state == "lost")
        await servers[0].start()
        await eventually(lambda: cluster.registry[0].state == "ready")
        before = len(servers[0].seen)
        assert await asyncio.gather(*(ask(cluster, f"s{i}", [i + 2], 5) for i in range(4))) == [
            greedy([i + 2], 5) for i in range(4)
        ]
        assert len(servers[0].seen) > before


async def test_a_server_that_hangs_is_lost_and_what_it_says_later_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.cluster.http_server.PROBE_S", 0.3)

    servers = [TokenServer(pause_at=5), TokenServer(pause_at=5)]
    async with cluster_of(servers) as cluster:
        asked = [asyncio.create_task(ask(cluster, f"r{i}", [i + 2, 3], 60)) for i in range(4)]
        await eventually(lambda: sum(server.running for server in servers) == 4)
        servers[0].frozen = True
        resume(servers)
        assert await asyncio.gather(*asked) == [greedy([i + 2, 3], 60) for i in range(4)]
        servers[0].frozen = False
        await eventually(lambda: cluster.registry[0].state == "ready")


async def test_requests_wait_for_a_server_when_all_are_gone_new_ones_too_for_some_seconds() -> None:
    server = TokenServer(pause_at=5)
    async with cluster_of([server]) as cluster:
        asked = asyncio.create_task(ask(cluster, "r", PROMPT, 40))
        await eventually(lambda: server.running == 1)
        await server.stop()
        resume([server])
        await eventually(lambda: cluster.state == "recovering")
        new = asyncio.create_task(ask(cluster, "s", PROMPT, 4))
        await eventually(lambda: cluster.report().waiting == 2)
        await server.start()
        assert await asked == greedy(PROMPT, 40)
        assert await new == greedy(PROMPT, 4)


async def test_a_client_that_leaves_ends_its_request_on_the_instance() -> None:
    server = TokenServer(gap_s=0.01)
    async with cluster_of([server]) as cluster:
        async with aclosing(stream(cluster, "r", PROMPT, 1000)) as pieces:
            await anext(pieces)
        await eventually(lambda: server.running == 0)
        assert server.seen[0].ended == "aborted"
        assert cluster.report().requests == 0


async def test_a_client_that_leaves_during_the_prefill_ends_it() -> None:
    server = TokenServer(prefill_s=10.0)
    async with cluster_of([server]) as cluster:
        asked = asyncio.create_task(ask(cluster, "r", PROMPT, 10))
        await eventually(lambda: server.running == 1)
        asked.cancel()
        await eventually(lambda: server.running == 0)
        assert server_of(cluster, 0).queue.requests == 0


async def test_a_busy_server_is_asked_again_and_busy_servers_are_the_clients_429() -> None:
    server = TokenServer(busy=2)
    async with cluster_of([server]) as cluster:
        assert await ask(cluster, "r", PROMPT, 5) == greedy(PROMPT, 5)
        server.busy = 1000
        with pytest.raises(OverloadedError, match="all instances are busy: full"):
            await ask(cluster, "s", PROMPT, 5)


async def test_a_request_that_no_instance_takes_is_the_clients_own_fault() -> None:
    async with cluster_of([TokenServer(max_model_len=10)]) as cluster:
        with pytest.raises(RequestError, match="requests of up to 10"):
            await ask(cluster, "r", PROMPT, 50)
        with pytest.raises(RequestError, match="log-probabilities"):
            await ask(cluster, "s", PROMPT, 2, logprobs=1)


async def test_a_request_that_loses_every_instance_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.cluster.requests.PAUSE_S", 0.001)

    async with cluster_of([TokenServer(break_after=0)]) as cluster:
        with pytest.raises(UnavailableError, match="lost 7 times"):
            await ask(cluster, "r", PROMPT, 5)


async def test_penalties_on_output_begin_the_answer_anew_and_the_client_gets_each_token_once() -> None:
    servers = [TokenServer(break_after=6, breaks=1), TokenServer()]
    async with cluster_of(servers) as cluster:
        assert await ask(cluster, "r", PROMPT, 15, presence_penalty=0.5) == greedy(PROMPT, 15)
        bodies = [held.body for server in servers for held in server.seen]
        assert [body["prompt"] for body in bodies] == [PROMPT] * len(bodies)


async def test_the_end_token_that_a_server_reports_is_not_part_of_the_answer() -> None:
    async with cluster_of([TokenServer(end_token_at=len(PROMPT) + 3)]) as cluster:
        assert await ask(cluster, "r", PROMPT, 15) == greedy(PROMPT, 3)


async def test_slos_and_sampling_reach_the_instance() -> None:
    server = TokenServer()
    async with cluster_of([server]) as cluster:
        submit = request("r", PROMPT, 2, temperature=0.5, seed=7, top_k=3, min_tokens=1)
        submit = type(submit)(**{name: getattr(submit, name) for name in submit.__struct_fields__} | {
            "slo": Slo(ttft_s=0.5), "priority": 2, "cache_salt": "owner/salt",
        })  # fmt: skip
        from array import array

        async with aclosing(cluster.generate(submit, array("i", PROMPT).tobytes())) as deltas:
            [_ async for _ in deltas]
        body, headers = server.seen[0].body, server.seen[0].headers
        assert (body["seed"], body["top_k"], body["temperature"], body["priority"]) == (7, 3, 0.5, 2)
        assert body["model"] == "tokens"
        assert body["cache_salt"].isalnum()
        assert len(body["cache_salt"]) <= 128
        await ask(cluster, "s", PROMPT, 2)
        assert "cache_salt" not in server.seen[1].body
        drawn = request("t", PROMPT, 2, temperature=0.5, seed=7, seed_drawn=True)
        async with aclosing(cluster.generate(drawn, array("i", PROMPT).tobytes())) as deltas:
            [_ async for _ in deltas]
        assert "seed" not in server.seen[2].body
        assert headers["x-llm-d-slo-ttft-ms"] == "500.000"
        assert headers["x-request-id"] == "r-1"


async def test_a_drained_instance_finishes_what_it_has_and_gets_nothing_new() -> None:
    servers = [TokenServer(pause_at=5), TokenServer(pause_at=5)]
    async with cluster_of(servers) as cluster:
        asked = [asyncio.create_task(ask(cluster, f"r{i}", [i + 2], 20)) for i in range(4)]
        await eventually(lambda: sum(server.running for server in servers) == 4)
        its = servers[0].running
        assert cluster.leave(0).state == "draining"
        resume(servers)
        assert await asyncio.gather(*asked) == [greedy([i + 2], 20) for i in range(4)]
        assert len(servers[0].seen) == its
        await eventually(lambda: [each.id for each in cluster.report().instances] == [1])
        with pytest.raises(RequestError, match="cannot leave: without it no instance is there"):
            cluster.leave(1)


async def test_a_request_ends_in_time() -> None:
    server = TokenServer(prefill_s=10.0)
    async with cluster_of([server]) as cluster:
        loop = asyncio.get_running_loop()
        assert await ask(cluster, "r", PROMPT, 5, timeout_s=loop.time() + 0.1) == []
        await eventually(lambda: server.running == 0)


async def test_a_cluster_without_any_server_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.cluster.client._ABSENT_S", 0.1)

    server = TokenServer(frozen=True)
    monkeypatch.setattr("headway.runtime.cluster.http_server.PROBE_S", 0.1)
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1"):
        async with cluster_of([server]):
            pass


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
async def test_random_faults_change_no_answer(seed: int) -> None:
    """Kills, hangs, refusals and cut streams at random, with clients that leave at random; half under the ladder."""
    placement, options = ("ladder", {}) if seed % 2 else ("jsq", {})

    chance = random.Random(seed)
    servers = [TokenServer(prefill_s=0.001, gap_s=0.002) for _ in range(3)]
    async with cluster_of(servers, placement, options) as cluster:
        over = asyncio.Event()
        faults = asyncio.create_task(_faults(chance, servers, over))
        names = [f"r{i}" for i in range(40)]
        results = await asyncio.gather(*(_client(chance, cluster, name) for name in names))
        over.set()
        await faults
        assert all(results)
        assert cluster.report().requests == 0


async def _client(chance: random.Random, cluster: ClusterClient, name: str) -> bool:
    """Ask and compare; one in five leaves early."""
    await asyncio.sleep(chance.random() * 2)
    prompt = [chance.randrange(2, 250) for _ in range(chance.randrange(1, 30))]
    count = chance.randrange(1, 60)
    stay = count if chance.random() < 0.8 else chance.randrange(count + 1)
    tokens: list[int] = []
    while True:
        try:
            async with aclosing(stream(cluster, name, prompt, count)) as pieces:
                async for piece in pieces:
                    tokens += piece
                    if len(tokens) >= stay and stay < count:
                        break
        except (UnavailableError, OverloadedError):
            assert not tokens
            await asyncio.sleep(0.05)
            continue
        return tokens == greedy(prompt, count)[: len(tokens)] and len(tokens) >= stay


async def _faults(chance: random.Random, servers: list[TokenServer], over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.sleep(chance.random() * 0.3)
        # One server is left alone, so that the test ends.
        server = servers[chance.randrange(2)]
        match chance.randrange(3):
            case 0:
                await server.stop()
                await asyncio.sleep(chance.random() * 0.2)
                await server.start()
            case 1:
                server.busy = chance.randrange(3)
            case 2:
                server.break_after = chance.randrange(8)
                await asyncio.sleep(0.1)
                server.break_after = None


@pytest.mark.parametrize("affinity", [True, False])
async def test_turns_go_where_their_conversation_is_assumed_to_be_cached(affinity: bool) -> None:
    """Each of two servers has begun a conversation; without affinity an idle cluster uses the first."""

    servers = [TokenServer(gap_s=0.001), TokenServer(gap_s=0.001)]
    async with cluster_of(servers, options={"affinity": affinity}) as cluster:
        texts = [[2 + (n * n + i) % 99 for n in range(300)] for i in range(2)]
        answers = await asyncio.gather(*(ask(cluster, f"a{i}", text, 90) for i, text in enumerate(texts)))
        assert [server.seen[0].body["prompt"] for server in servers] == texts
        turn = [*texts[1], *answers[1], 7]
        keys = TextKeys(array("i", turn).tobytes(), 64).keys
        # With the answer.
        assert [server_of(cluster, i).cached.match(keys) for i in range(2)] == [0, 6]
        await ask(cluster, "turn", turn, 3)
        await ask(cluster, "another", [5] * 200, 3)
        assert [len(server.seen) for server in servers] == ([2, 2] if affinity else [3, 1])


def test_texts_are_assumed_to_be_cached_until_a_cache_is_full_of_later_ones() -> None:
    known, rng = AssumedKeys(), random.Random(2)
    texts = [[bytes([i, k]) for k in range(rng.randrange(1, 20))] for i in range(6)]
    for text in texts:
        known.use(text, 30 * 64)
        assert known.match(text) == len(text)
    held = [known.match(text) for text in texts]
    assert sum(held) == 30
    # Later texts whole, one without its end, none of the earlier ones.
    assert held == sorted(held, key=bool)
    whole = [had == len(text) for had, text in zip(held, texts, strict=True)]
    assert whole == sorted(whole)
    known.clear()
    assert not known.match(texts[-1])
