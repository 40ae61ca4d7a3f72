"""A live cluster whose KV moves by NIXL: exact answers, and an instance that dies. Only where NIXL is installed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.helpers.cluster_probe import APART, cluster, pid_of, write
from tests.helpers.cluster_streams import ANSWER_TOKENS, LONG_PROMPT, SHORT_PROMPT, ClientStream, decoding
from tests.helpers.greedy_reference import GreedyReference
from tests.helpers.http_probe import metric
from tests.helpers.polling import until

pytest.importorskip("nixl")


def test_prefill_and_decode_on_two_instances_survive_a_kill(
    tmp_path: Path, llama: Path, reference: GreedyReference
) -> None:
    path = Path(write(tmp_path, llama, "fixed-sp", {"sp": 2}, APART))
    path.write_text(json.dumps({**json.loads(path.read_text()), "kv_connector": "nixl"}))
    with cluster(str(path)) as running:
        url = running.url
        for number in (0, 1, 2):
            assert "libucp" in Path(f"/proc/{pid_of(url, number)}/maps").read_text()
        one, other = ClientStream(url, LONG_PROMPT), ClientStream(url, SHORT_PROMPT)
        until(lambda: decoding(url, one))
        os.kill(pid_of(url, 2), signal.SIGKILL)
        assert [one.answer(), other.answer()] == [
            reference.tokens(LONG_PROMPT, ANSWER_TOKENS),
            reference.tokens(SHORT_PROMPT, ANSWER_TOKENS),
        ]
        assert metric(url, "headway_instance_restarts_total") == 1
