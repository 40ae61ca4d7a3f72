"""Hypothesis, the same on every machine: no deadline, no random seed. `HYPOTHESIS_PROFILE=thorough` (`make test-long`)
takes more examples of some, `explore` other ones. And two hosts for those tests that want them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.helpers.namespaces import Hosts, two_hosts

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, max_examples=50)
settings.register_profile("thorough", derandomize=True, deadline=None, database=None, max_examples=200)
settings.register_profile("explore", deadline=None, database=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made
