"""Settings of policies that make no sense are refused by name."""

from __future__ import annotations

import math

import pytest

from headway.core.errors import ConfigError
from headway.policy.placement.registry import check_options, names, options_of


def _numbers() -> list[tuple[str, str, float]]:
    found = []
    for name in names():
        for field, declared in options_of(name).model_fields.items():
            if isinstance(declared.default, float):
                found += [(name, field, -1.0), (name, field, math.nan)]
            elif isinstance(declared.default, int) and not isinstance(declared.default, bool):
                found.append((name, field, -1))
    return found


@pytest.mark.parametrize(("policy", "option", "value"), _numbers())
def test_negative_and_nan_options_are_refused(policy: str, option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"options of {policy}: .*{option}"):
        check_options(policy, {option: value})
