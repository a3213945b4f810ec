"""A client's identity: one name for the three protocols, and how the client proved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.settings.values import LoginMethod

ANONYMOUS_NAME: Final = "anonymous"
EVERYONE: Final = "*"
GROUP_PREFIX: Final = "group:"


class Identity(msgspec.Struct, frozen=True, gc=False):
    """A client's identity; equal ones have equal rights."""

    name: str  # the principal of the access list
    method: LoginMethod  # how the name was proven
    groups: tuple[str, ...] = ()  # what else the proof says of the client: a token's groups or roles
    claims: tuple[tuple[str, tuple[str, ...]], ...] = ()  # those of a token that the access list asks for
    common_name: str | None = None  # of its certificate, however the name was proven; where the access list asks for it
    tenant: str | None = None  # whose client it is (`gateway.security.tenants`); None: of none, or there are none

    def is_same_client(self, other: Identity) -> bool:
        """Whether both are one client's, whose groups may have changed meanwhile."""
        return (self.name, self.method, self.tenant) == (other.name, other.method, other.tenant)

    @property
    def principals(self) -> set[str]:
        """What rules that are about this client may call it; a client's name cannot stand in for a group."""
        found = {EVERYONE, *(GROUP_PREFIX + group for group in self.groups)}
        if self.method == "anonymous":
            found.add(ANONYMOUS_NAME)
        elif self.name != ANONYMOUS_NAME and not self.name.startswith(GROUP_PREFIX):
            found.add(self.name)
        return found

    def with_certificate(self, peercert: Mapping[str, Any] | None) -> Identity:
        """The same client, who also showed a verified certificate, as of `SSLObject.getpeercert`."""
        name = common_name(peercert)
        return self if name == self.common_name else msgspec.structs.replace(self, common_name=name)


ANONYMOUS: Final = Identity(ANONYMOUS_NAME, "anonymous")


def is_principal(name: str) -> bool:
    """Whether `name` may be a proven name: not empty, and none that the access list uses for something else."""
    return name not in ("", ANONYMOUS_NAME, EVERYONE)


def common_name(peercert: Mapping[str, Any] | None) -> str | None:
    """The one common name in a verified certificate, as of `SSLObject.getpeercert`; None: there is none, or several."""
    subject = peercert.get("subject", ()) if peercert else ()
    names: list[str] = [value for part in subject for name, value in part if name == "commonName"]
    return names[0] if len(names) == 1 else None
