"""Clients of a live cluster in threads of their own, and moments of their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
from tests.helpers.cluster_probe import instances
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.http_probe import stream

LONG_PROMPT = prompt_of(5, 3000)


SHORT_PROMPT = prompt_of(6, 300)


ANSWER_TOKENS = 150


class ClientStream(threading.Thread):
    """A client in a thread of its own. `told`: tokens so far."""

    def __init__(self, url: str, prompt: list[int]) -> None:
        super().__init__()
        self.url, self.prompt = url, prompt
        self.told: list[int] = []
        self.error: object = None
        self.start()

    def run(self) -> None:
        for event in stream(self.url, self.prompt, ANSWER_TOKENS, ignore_eos=True):
            if "error" in event:
                self.error = event
                return
            self.told += event["choices"][0]["token_ids"]

    def answer(self) -> list[int]:
        """All of it."""
        self.join(100)
        assert not self.is_alive(), f"it hangs after {len(self.told)} tokens"
        assert self.error is None, self.error
        return self.told


def queued_tokens(url: str, number: int) -> int:
    (tokens,) = (each["queued_tokens"] for each in instances(url) if each["id"] == number)
    return int(tokens)


def transfers(url: str) -> int:
    return int(httpx.get(f"{url}/v1/cluster", timeout=10).json()["transfers"])


def all_ready(url: str) -> bool:
    return all(each["state"] == "ready" for each in instances(url))


def computing(number: int) -> Callable[[str, ClientStream], object]:
    return lambda url, one: queued_tokens(url, number) > 0


def handing_over(url: str, one: ClientStream) -> object:
    return transfers(url) > 0


def decoding(url: str, one: ClientStream) -> object:
    return len(one.told) >= 20
