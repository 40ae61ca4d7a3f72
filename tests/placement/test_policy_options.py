"""Settings of policies that make no sense are refused by name."""

from __future__ import annotations

import math

import msgspec
import pytest

from headway.core.errors import ConfigError
from headway.policy.placement.registry import check_options, names, options_of


def _numbers() -> list[tuple[str, str, float]]:
    found = []
    for name in names():
        for field in msgspec.structs.fields(options_of(name)):
            if isinstance(field.default, float):
                found += [(name, field.name, -1.0), (name, field.name, math.nan)]
            elif isinstance(field.default, int) and not isinstance(field.default, bool):
                found.append((name, field.name, -1))
    return found


@pytest.mark.parametrize(("policy", "option", "value"), _numbers())
def test_negative_and_nan_options_are_refused(policy: str, option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"options of {policy}: .*{option}"):
        check_options(policy, {option: value})
