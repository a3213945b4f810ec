"""Bearer tokens over SASL: the mechanisms OAUTHBEARER (RFC 7628) and XOAUTH2 (its predecessor, still in use).

    OAUTHBEARER  n,a=<name>,^Ahost=...^Aport=...^Aauth=Bearer <token>^A^A      name, host and port are optional
    XOAUTH2      user=<name>^Aauth=Bearer <token>^A^A

^A is the byte 0x01. A refusal is sent twice (RFC 7628 part 3.2.2): first as JSON in a challenge, to which the client
may answer anything, then as the SASL outcome.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.security.login.exchange import Done, Failed, MessageError, Step
from gateway.security.login.scram import saslname
from gateway.security.login.tokens import TokenError, VerifiedToken

OAUTHBEARER: Final = "OAUTHBEARER"
XOAUTH2: Final = "XOAUTH2"
MECHANISMS: Final = (OAUTHBEARER, XOAUTH2)

MESSAGE_LIMIT: Final = 32_768  # bytes: a token plus the framing
_SEPARATOR: Final = "\x01"
_SCHEME: Final = "bearer "


class BearerServer:
    """One exchange of OAUTHBEARER or XOAUTH2. The client must be `user`, or any user if that is None."""

    def __init__(
        self, mechanism: str, verify_token: Callable[[str], Awaitable[VerifiedToken]], user: str | None
    ) -> None:
        """Start an exchange. `verify_token` verifies a token and raises TokenError if it is not valid."""
        self._mechanism = mechanism
        self._verify_token = verify_token
        self._user = user

    async def step(self, message: bytes) -> Step:
        """Process the client's only message; an unknown key may cost a wait."""
        try:
            name, token = self._read(message)
            shown = await self._verify_token(token)
        except MessageError as fault:
            return self._failed("invalid_request", "400", str(fault))
        except TokenError as fault:
            return self._failed("invalid_token", "401", f"token: {fault}")
        identity = shown.identity
        if name not in ("", identity.name):  # acting for another user is not supported (as for PLAIN)
            return self._failed("invalid_token", "401", "the name is not the token's")
        if self._user not in (None, identity.name):
            return self._failed("invalid_token", "401", "the user has changed")
        return Done(identity, b"", shown.expires_ms)

    def _failed(self, error: str, status: str, reason: str) -> Failed:
        said = {"status": error} if self._mechanism == OAUTHBEARER else {"status": status, "schemes": "bearer"}
        return Failed(reason, challenge=json.dumps(said, separators=(",", ":")).encode())

    def _read(self, message: bytes) -> tuple[str, str]:
        """The name that is claimed, "" for none, and the token."""
        if len(message) > MESSAGE_LIMIT:
            raise MessageError("a message that is too long")
        try:
            parts = message.decode().split(_SEPARATOR)
        except UnicodeDecodeError:
            raise MessageError("a message that is not UTF-8") from None
        if len(parts) < 3 or parts[-2:] != ["", ""]:
            raise MessageError("a message that does not end as it should")
        del parts[-2:]
        name = _authorization(parts.pop(0)) if self._mechanism == OAUTHBEARER else ""
        pairs: dict[str, str] = {}
        for part in parts:
            key, mark, value = part.partition("=")
            if not mark or not (key.isascii() and key.isalpha()) or key in pairs:
                raise MessageError("a malformed or duplicate pair")
            pairs[key] = value
        if self._mechanism == XOAUTH2:
            name = pairs.get("user", "")
        credentials = pairs.get("auth", "")
        if credentials[: len(_SCHEME)].lower() != _SCHEME:
            raise MessageError("no bearer token")
        return name, credentials[len(_SCHEME) :].strip(" ")


def _authorization(header: str) -> str:
    """Return the name in a GS2 header (RFC 5801 part 4), "" if there is none."""
    parts = header.split(",")
    if len(parts) != 3 or parts[0] not in ("n", "y") or parts[2] or parts[1][:2] not in ("", "a="):
        raise MessageError("no GS2 header, or one with channel binding")
    return saslname(parts[1][2:])
