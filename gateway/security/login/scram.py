"""SCRAM (RFC 5802, RFC 7677), server side: the client proves that it knows the password without sending it.

Sans-io: messages in, steps out; the nonce is a constructor argument. MQTT carries the messages in AUTH packets, AMQP in
SASL frames. Channel binding is not offered, so a client sends `n` or `y`.

    client-first  n,,n=ann,r=<its nonce>            asks for the salt
    server-first  r=<both nonces>,s=<salt>,i=<iterations>
    client-final  c=biws,r=<both nonces>,p=<proof>  the server checks the proof
    server-final  v=<signature>                     proves that the server knows the password's keys
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.security.identity import Identity
from gateway.security.login.exchange import Continue, Done, Failed, MessageError, Step
from gateway.security.login.saslprep import saslprep

MECHANISMS: Final = {"SCRAM-SHA-512": "sha512", "SCRAM-SHA-256": "sha256"}
"""The mechanisms, best first, with the `hashlib` name of their hash."""

MINIMUM_ITERATIONS: Final = 4096  # RFC 7677 part 4
MESSAGE_LIMIT: Final = 2048  # bytes of one client message; real ones have about 200
NONCE_CHARACTERS: Final = frozenset(map(chr, range(0x21, 0x7F))) - {","}  # RFC 5802 part 7: printable


class ScramCredential(msgspec.Struct, frozen=True):
    """The stored form of a password: suffices to check a proof but not to create one. The repr shows no key."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return f"ScramCredential(iterations={self.iterations})"

    __str__ = __repr__


class ScramServer:
    """One exchange. Any message, whatever its content, gives a step and never raises."""

    def __init__(
        self, mechanism: str, look_up: Callable[[str], ScramCredential], nonce: str, user: str | None = None
    ) -> None:
        """Start an exchange with one of `MECHANISMS`. `nonce` must be new: printable ASCII without a comma.

        The client must be `user`, or any user if that is None.

        `look_up` returns a credential for every prepared name. For an unknown name it is made up, but always the same,
        so that the answer does not reveal which names exist. No client can prove a made-up one: its stored key is not
        the hash of any known key.
        """
        self._hash = MECHANISMS[mechanism]
        self._look_up = look_up
        self._nonce = nonce
        self._expected = user
        self._next: Callable[[str], Step] | None = self._client_first
        self._gs2_header = ""
        self._user = ""
        self._credential: ScramCredential | None = None
        self._said = ""  # client-first-message-bare "," server-first-message

    def step(self, message: bytes) -> Step:
        """Process the client's next message."""
        handle, self._next = self._next, None
        if handle is None:
            return Failed("the exchange is over")
        if len(message) > MESSAGE_LIMIT:
            return Failed("the message is too long")
        try:
            return handle(message.decode())
        except UnicodeDecodeError:
            return Failed("the message is not UTF-8")
        except MessageError as fault:
            return Failed(str(fault))

    def _client_first(self, message: str) -> Step:
        flag, _, rest = message.partition(",")
        authorization, _, bare = rest.partition(",")
        if flag.startswith("p="):
            raise MessageError("channel binding is not offered")
        if flag not in ("n", "y"):
            raise MessageError("the GS2 header is missing")
        if bare.startswith("m="):
            raise MessageError("mandatory extensions are not supported")
        attributes = bare.split(",")
        if len(attributes) < 2:
            raise MessageError("the first message has no name or nonce")
        user = _name(_value("n", attributes[0]))
        # Acting for another user is not supported (as for PLAIN).
        if authorization and _name(_value("a", authorization)) != user:
            raise MessageError("the authorization identity is not the user")
        nonce = _value("r", attributes[1])
        if not NONCE_CHARACTERS.issuperset(nonce):
            raise MessageError("the nonce has unprintable characters")
        self._gs2_header = f"{flag},{authorization},"
        self._user = user
        self._nonce = nonce + self._nonce
        self._credential = credential = self._look_up(user)
        salt = binascii.b2a_base64(credential.salt, newline=False).decode()
        answer = f"r={self._nonce},s={salt},i={credential.iterations}"
        self._said = f"{bare},{answer}"
        self._next = self._client_final
        return Continue(answer.encode())

    def _client_final(self, message: str) -> Step:
        credential = self._credential
        assert credential is not None
        without_proof, _, encoded_proof = message.rpartition(",p=")
        attributes = without_proof.split(",")
        if len(attributes) < 2:
            raise MessageError("the final message has no binding, nonce or proof")
        binding = _bytes(_value("c", attributes[0]))
        nonce = _value("r", attributes[1])
        proof = _bytes(encoded_proof)
        if binding != self._gs2_header.encode():
            raise MessageError("the GS2 header has changed")
        if not hmac.compare_digest(nonce.encode(), self._nonce.encode()):
            raise MessageError("the nonce has changed")
        said = f"{self._said},{without_proof}".encode()
        signature = hmac.digest(credential.stored_key, said, self._hash)
        if len(proof) != len(signature):
            raise MessageError("the proof has the wrong length")
        client_key = bytes(left ^ right for left, right in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), credential.stored_key):
            return Failed("user name or password is wrong")
        if self._expected not in (None, self._user):
            return Failed("the user has changed")
        answer = hmac.digest(credential.server_key, said, self._hash)
        return Done(Identity(self._user, "scram"), b"v=" + binascii.b2a_base64(answer, newline=False))


def digest_size(mechanism: str) -> int:
    """Return the length of a mechanism's keys and proofs in bytes."""
    return hashlib.new(MECHANISMS[mechanism]).digest_size


def derive(mechanism: str, password: str, salt: bytes, iterations: int) -> ScramCredential:
    """Derive the credential of a password (RFC 5802 part 3). Slow on purpose.

    Raises ValueError if SASLprep refuses the password, or there are too few iterations.
    """
    if iterations < MINIMUM_ITERATIONS:
        raise ValueError(f"at least {MINIMUM_ITERATIONS} iterations are needed")
    name = MECHANISMS[mechanism]
    salted = hashlib.pbkdf2_hmac(name, saslprep(password, stored=True).encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", name)
    return ScramCredential(
        iterations, salt, hashlib.new(name, client_key).digest(), hmac.digest(salted, b"Server Key", name)
    )


def _value(attribute: str, text: str) -> str:
    if not text.startswith(f"{attribute}=") or len(text) == 2:
        raise MessageError(f"attribute {attribute} is missing or empty")
    return text[2:]


def _name(text: str) -> str:
    """Unescape a saslname and prepare it as a query (RFC 5802 part 5.1)."""
    plain = saslname(text)
    try:
        name = saslprep(plain)
    except ValueError as error:
        raise MessageError(f"the name contains {error}") from None
    if not name:
        raise MessageError("the name is empty")
    return name


def saslname(text: str) -> str:
    """Unescape a saslname (RFC 5802 part 5.1); raises MessageError."""
    plain = text.replace("=2C", ",")
    if plain.replace("=3D", "").count("="):
        raise MessageError("the name has an unescaped equals sign")
    return plain.replace("=3D", "=")


def _bytes(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise MessageError("not base64") from None
