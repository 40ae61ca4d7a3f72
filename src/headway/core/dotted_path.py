"""Classes of a user's own, named by a dotted path: `package.module.Name`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from headway.core.errors import ConfigError


def is_dotted(name: str) -> bool:
    """Return whether a setting names a class by its path, and not one of Headway's own by its name."""
    return "." in name


def load_dotted(path: str, what: str) -> Any:
    """Import the object at `path`. Modules are found as by Python, and in the current folder.

    what: the kind of thing that it is, for errors. Raises ConfigError where the path leads nowhere; an error inside the
    module is raised as it is.
    """
    module, _, name = path.rpartition(".")
    # Console scripts do not have the current folder on their path, unlike `python -m`.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        # A module that the user's own module imports is missing: not the path's fault.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ConfigError(f"{what} {path!r}: there is no module {error.name!r} on Python's path or in {here}") from None
    except (AttributeError, ValueError):
        raise ConfigError(f"{what} {path!r}: the module {module!r} has no {name!r}") from None
