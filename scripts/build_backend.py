"""setuptools as build backend; wheels alone need more than it, to compile `compiled_modules`.

pip installs these requirements where a wheel is built in isolation. An editable install compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), "mypy>=1.13", "numpy>=2,<3", "msgspec>=0.19,<1"]
