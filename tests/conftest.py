"""The environment of all tests, whatever the caller has set; Hypothesis, the same on every machine, however slow: no
deadline, no random seed; coroutines as tests; and two hosts for some.

`HYPOTHESIS_PROFILE=thorough` (`make test-long`) takes more examples of some properties, `explore` other ones.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.helpers.namespaces import Hosts, two_hosts

# What the caller has set for Headway, for libraries or for a terminal would change what tests see.
_FOREIGN = ("HEADWAY_", "HF_", "TRANSFORMERS_", "OPENAI_", "OTEL_", "RAY_", "UVICORN_", "VLLM_")
_TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
for _name in list(os.environ):
    _foreign = _name.startswith(_FOREIGN) or _name in _TERMINAL or _name.lower().endswith("_proxy")
    if _foreign and _name != "HEADWAY_NATIVE":
        del os.environ[_name]
# Processes that the product starts do not search the working directory (`-P`): doubles of engines are in `tests`.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests share the cores
_ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
_ANYWHERE = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deterministic", _ANYWHERE, derandomize=True, max_examples=50)
settings.register_profile("thorough", _ANYWHERE, derandomize=True, max_examples=200)
settings.register_profile("explore", _ANYWHERE, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test that nobody else runs: what it waits for is said a little before pytest ends it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def limited() -> None:
        async with asyncio.timeout(100):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})

    asyncio.run(limited())
    return True
