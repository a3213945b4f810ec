"""A client's identity: one name for the three protocols, and how the client proved it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Method = Literal["anonymous", "password", "scram", "certificate", "token"]

ANONYMOUS_NAME: Final = "anonymous"
EVERYONE: Final = "*"
GROUP_PREFIX: Final = "group:"


class Identity(msgspec.Struct, frozen=True, gc=False):
    """A client's identity; equal ones have equal rights."""

    name: str  # the principal of the access list
    method: Method  # how the name was proven
    groups: tuple[str, ...] = ()  # what else the proof says of the client: a token's groups or roles

    def is_same_client(self, other: Identity) -> bool:
        """Whether both are one client's, whose groups may have changed meanwhile."""
        return (self.name, self.method) == (other.name, other.method)

    def is_named(self, principal: str) -> bool:
        """Whether a rule for `principal` is about this client."""
        if principal == ANONYMOUS_NAME:
            return self.method == "anonymous"
        if principal.startswith(GROUP_PREFIX):  # a client's name cannot stand in for a group
            return principal.removeprefix(GROUP_PREFIX) in self.groups
        return principal in (EVERYONE, self.name)


ANONYMOUS: Final = Identity(ANONYMOUS_NAME, "anonymous")


def is_principal(name: str) -> bool:
    """Whether `name` may be a proven name: not empty, and none that the access list uses for something else."""
    return name not in ("", ANONYMOUS_NAME, EVERYONE)
