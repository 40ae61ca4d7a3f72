"""Targets of classes in the plug-in's settings: for requests that ask for none."""

from __future__ import annotations

import pytest

from headway.core.errors import ConfigError
from headway.core.request import Slo
from headway.policy.hosted.settings import read_settings


def test_a_request_without_targets_has_those_of_its_class() -> None:
    settings = read_settings({"headway": {"classes": {"short": {"ttft_ms": 500, "tpot_ms": 60}}}})
    assert settings.slo_of(Slo(), 8192) == Slo(ttft_s=0.5, tbt_s=0.06)
    assert settings.slo_of(Slo(), 8193) == Slo()
    asked = Slo(ttft_s=2.0)
    assert settings.slo_of(asked, 9) is asked


@pytest.mark.parametrize("classes", [{"medium": {}}, {"short": {"ttft_ms": 0}}, {"long": {"ttft": 5}}])
def test_a_class_or_target_that_does_not_exist_is_refused(classes: object) -> None:
    with pytest.raises(ConfigError, match="classes"):
        read_settings({"headway": {"classes": classes}})
