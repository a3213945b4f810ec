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

from gateway.security.exchange import Done, Exchange, Failed, LoginGuard, Step
from gateway.security.scram import Continue, MessageError, saslname
from gateway.security.tokens import TokenError, VerifiedToken

OAUTHBEARER: Final = "OAUTHBEARER"
XOAUTH2: Final = "XOAUTH2"
MECHANISMS: Final = (OAUTHBEARER, XOAUTH2)

MESSAGE_LIMIT: Final = 32_768  # bytes: a token plus the framing
_SEPARATOR: Final = "\x01"
_SCHEME: Final = "bearer "


class BearerExchange(Exchange):
    """An exchange of OAUTHBEARER or XOAUTH2."""

    __slots__ = ("_asked", "_mechanism", "_refused", "_verify_token")

    def __init__(
        self,
        mechanism: str,
        verify_token: Callable[[str], Awaitable[VerifiedToken]],
        guard: LoginGuard,
        address: str,
        user: str | None,
    ) -> None:
        """Start an exchange. `verify_token` verifies a token and raises TokenError if it is not valid."""
        super().__init__(guard, address, user)
        self._mechanism = mechanism
        self._verify_token = verify_token
        self._asked = False
        self._refused: str | None = None  # the reason, once the JSON challenge was sent

    async def step(self, data: bytes | None) -> Step:
        """Process the client's next message. Refusals are delayed on purpose; an unknown key may cost a wait."""
        if self._refused is not None:
            return Failed(self._refused)
        if data is None and not self._asked:
            self._asked = True
            return Continue(b"")  # RFC 4422 part 3: the client sent no initial response
        if (busy := self._busy()) is not None:
            return busy
        try:
            name, token = self._read(data or b"")
        except MessageError as fault:
            return await self._refuse("invalid_request", "400", str(fault))
        try:
            shown = await self._verify_token(token)
        except TokenError as fault:
            return await self._refuse("invalid_token", "401", f"token: {fault}")
        identity = shown.identity
        if name not in ("", identity.name):  # acting for another user is not supported (as for PLAIN)
            return await self._refuse("invalid_token", "401", "the name is not the token's")
        if self._user not in (None, identity.name):
            return await self._refuse("invalid_token", "401", "the user has changed")
        self._guard.accepted()
        return Done(identity, b"", shown.expires_ms)

    async def _refuse(self, error: str, status: str, reason: str) -> Continue:
        await self._guard.wait_refused(self._address)
        self._refused = reason
        said = {"status": error} if self._mechanism == OAUTHBEARER else {"status": status, "schemes": "bearer"}
        return Continue(json.dumps(said, separators=(",", ":")).encode())

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
