"""The part of Ray that `runtime.launcher.ray_hosts` uses, in one process: actors are objects on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from headway.runtime.launcher.host_actor import HostActor


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class FakeRay:
    """Stands for the module and for its scheduler. Ends with `shutdown`, like the module.

    misused: whether it was waited for while or after it was shut down; Ray itself may then end the whole process.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._actors: list[FakeActor] = []
        self._waiting, self._shut = 0, False
        self.misused = False

    def actor(self, model: str, there: bool = True) -> FakeActor:
        actor = FakeActor(self, model, there)
        self._actors.append(actor)
        return actor

    def get(self, futures: Any) -> Any:
        with self._used():
            return [each.result() for each in futures] if isinstance(futures, list) else futures.result()

    def wait(self, futures: Sequence[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        with self._used():
            done, rest = wait_for(futures, timeout)
            return list(done), list(rest)

    @contextmanager
    def _used(self) -> Iterator[None]:
        self.misused |= self._shut
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def shutdown(self) -> None:
        self._shut = True
        self.misused |= self._waiting > 0
        for actor in self._actors:
            actor.lose()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class FakeActor:
    """A handle of a `HostActor`: `actor.method.remote(…)` returns a future. Calls fail while its host is lost."""

    def __init__(self, ray: FakeRay, model: str, there: bool) -> None:
        self._ray, self._model = ray, model
        self._calls: list[Future[Any]] = []
        self._actor: HostActor | None = None
        if there:
            self.come()

    def come(self) -> None:
        """Its host is there, and nothing runs on it."""
        self._actor = HostActor(self._model, "127.0.0.1")

    def lose(self) -> None:
        """Its host is lost, with all that runs there."""
        actor, self._actor = self._actor, None
        if actor is not None:
            for process in list(actor._running.values()):
                process.kill()
                process.wait()
        for call in self._calls:
            call.cancel()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: self._call(name, *words))

    def _call(self, name: str, *words: Any) -> Future[Any]:
        if self._actor is None:
            failed: Future[Any] = Future()
            failed.set_exception(RayError("the actor is unavailable"))
            return failed
        call = asyncio.run_coroutine_threadsafe(getattr(self._actor, name)(*words), self._ray.loop)
        self._calls.append(call)
        return call
