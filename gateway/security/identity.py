"""A client's identity: one name for the three protocols, and how the client authenticated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.settings.values import LoginMethod

ANONYMOUS_NAME: Final = "anonymous"
EVERYONE: Final = "*"
GROUP_PREFIX: Final = "group:"


class Identity(msgspec.Struct, frozen=True, gc=False):
    """A client's identity. Equal identities have equal rights."""

    name: str  # the principal of the access list
    method: LoginMethod  # how the client authenticated
    groups: tuple[str, ...] = ()  # a token's groups or roles
    claims: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the token's claims that the access list uses
    common_name: str | None = None  # of its certificate, whatever the login method, if the access list uses it
    tenant: str | None = None  # see `gateway.security.tenancy`; None without a tenant

    def is_same_client(self, other: Identity) -> bool:
        """Return whether both belong to the same client; its groups may have changed."""
        return (self.name, self.method, self.tenant) == (other.name, other.method, other.tenant)

    @property
    def principals(self) -> set[str]:
        """The principals that this client matches in rules. A client's name cannot pass for a group."""
        names = {EVERYONE, *(GROUP_PREFIX + group for group in self.groups)}
        if self.method == "anonymous":
            names.add(ANONYMOUS_NAME)
        elif self.name != ANONYMOUS_NAME and not self.name.startswith(GROUP_PREFIX):
            names.add(self.name)
        return names

    def with_certificate(self, peercert: Mapping[str, Any] | None) -> Identity:
        """Return the identity with the common name of a verified certificate, as from `SSLObject.getpeercert`."""
        name = common_name(peercert)
        return self if name == self.common_name else msgspec.structs.replace(self, common_name=name)


ANONYMOUS: Final = Identity(ANONYMOUS_NAME, "anonymous")


def share_of(identity: Identity, address: str) -> str:
    """Return what a client's share of a limit is counted by: its name and tenant, or an anonymous one's address.

    `address` is from `throttle.address_of`.
    """
    if identity.method == "anonymous":
        return f"/{address}"  # cannot be mistaken for a login's name
    return identity.name if identity.tenant is None else f"{identity.tenant}\0{identity.name}"


def is_principal(name: str) -> bool:
    """Return whether `name` may be a client's name: not empty and not reserved by the access list."""
    return name not in ("", ANONYMOUS_NAME, EVERYONE)


def common_name(peercert: Mapping[str, Any] | None) -> str | None:
    """Return the common name in a certificate, as from `SSLObject.getpeercert`; None if there is none, or several."""
    names = subject_values(peercert, "commonName")
    return names[0] if len(names) == 1 else None


def subject_values(peercert: Mapping[str, Any] | None, field: str) -> list[str]:
    """Return the values of one field of a certificate's subject, such as `commonName`."""
    subject = peercert.get("subject", ()) if peercert else ()
    return [value for part in subject for name, value in part if name == field]
