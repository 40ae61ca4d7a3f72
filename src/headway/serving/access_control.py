"""Who may do what: keys of clients and of operators, and, where there is no key, web pages kept out.

Without a key only programs of this machine are meant to be served. A page of any site that a user of this machine has
open can send requests to loopback as well, so its origin is checked, and the host that was asked for: a name that its
owner lets point to 127.0.0.1 ("DNS rebinding") is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from headway.serving.binding import is_loopback
from headway.serving.errors import ApiError
from headway.serving.settings import ServerSettings

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
_ADMINISTRATION = "/v1/cluster"


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """The sender of a request, as far as its key says."""

    id: str = ""
    """A hash of the key; empty without one. Journaled requests belong to it."""
    admin: bool = False
    """Whether it was the administration's key: it reads and deletes the requests of all."""

    def may_use(self, owner: str) -> bool:
        """Whether a request of that owner may be read and deleted."""
        return self.admin or self.id == owner


class AccessControl:
    """The rules of one server. Paths outside `PROTECTED` are open."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._keys = settings.api_keys
        self._admin_key = settings.admin_key

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RequestOwner:
        """Return the request's owner. Raises ApiError 401 or 403 for what it may not do."""
        if not scope["path"].startswith(PROTECTED):
            return RequestOwner()
        owner = self._owner(headers.get(b"authorization", b""))
        if scope["path"].startswith(_ADMINISTRATION):
            self._check_administration(scope, owner)
        elif self._keys and owner is None:
            raise _refusal("missing or wrong API key")
        if not self._keys and owner is None:
            self._check_page(headers)
        return owner or RequestOwner()

    def _owner(self, given: bytes) -> RequestOwner | None:
        """Return the owner whose key was sent; None for no key or an unknown one."""
        found: RequestOwner | None = None
        for key in (*self._keys, *([self._admin_key] if self._admin_key else [])):
            # Constant time, and all keys are compared, so that none can be guessed byte by byte.
            if hmac.compare_digest(given, f"Bearer {key}".encode()):
                found = RequestOwner(hashlib.sha256(key.encode()).hexdigest()[:16], key == self._admin_key)
        return found

    def _check_administration(self, scope: Scope, owner: RequestOwner | None) -> None:
        if self._admin_key is not None:
            if owner is None or not owner.admin:
                raise _refusal("missing or wrong administration key (--admin-key)")
        elif self._keys:
            if owner is None:
                raise _refusal("missing or wrong API key")
            raise ApiError(403, "clients' keys do not administer the cluster: the server needs --admin-key for that")
        elif not is_loopback((scope.get("client") or ("",))[0]):
            raise ApiError(403, "without --admin-key a cluster is administered from its own machine only")

    def _check_page(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse web pages of other sites, and names that are none of this machine's. Raises ApiError 403."""
        host = headers.get(b"host", b"").decode("latin-1")
        name = urlsplit(f"//{host}").hostname or ""
        known = is_loopback(name) or name.endswith(".localhost") or name in self._settings.allowed_hosts
        # On other addresses the operator has said that a gateway in front decides (--allow-public).
        if host and not known and is_loopback(self._settings.host):
            raise ApiError(403, f"the host {name[:100]!r} is not this machine: use localhost, or --allowed-hosts")
        origin = headers.get(b"origin", b"").decode("latin-1")
        allowed = self._settings.allowed_origins
        if origin and urlsplit(origin).netloc != host and "*" not in allowed and origin not in allowed:
            raise ApiError(403, f"pages of {origin[:100]!r} may not call this server (--allowed-origins)")


def _refusal(why: str) -> ApiError:
    return ApiError(401, why, headers={"WWW-Authenticate": "Bearer"})
