"""Logins of every kind, with the files that a gateway needs for them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from pwdlib.hashers.argon2 import Argon2Hasher

from loadtest.clients.mqtt_wire import auth_packet, connect_packet
from loadtest.clients.talk import MqttTalk

SCRAM: Final = "SCRAM-SHA-256"
ITERATIONS: Final = 4096  # a cost of the client alone
ISSUER, AUDIENCE = "loadtest", "trivium"
PASSWORD: Final = "a password of a human"
AUTH: Final = 0xF0


class Login(NamedTuple):
    """One client's login: CONNECT, its TLS, and the answer to a challenge."""

    connect: bytes
    tls: ssl.SSLContext | None = None
    answer: Callable[[bytes], bytes] | None = None


class Files:
    """Certificates, keys and users for `count` clients of each kind, and `slow` users with Argon2."""

    def __init__(self, directory: Path, count: int, slow: int) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(directory / "authority.pem")
        self._authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
        self._secrets = {f"device-{number}": f"tds1_{secrets.token_urlsafe(32)}" for number in range(count)}
        hashed = Argon2Hasher().hash(PASSWORD)
        lines = [f"human-{number}:{hashed}\n" for number in range(slow)]
        lines += [
            f"{name}:$device-sha256${hashlib.sha256(secret.encode()).hexdigest()}\n"
            for name, secret in self._secrets.items()
        ]
        (directory / "passwords").write_text("".join(lines))
        # One credential for all users of SCRAM: the gateway's work does not depend on it.
        salt = secrets.token_bytes(16)
        salted = hashlib.pbkdf2_hmac("sha256", PASSWORD.encode(), salt, ITERATIONS)
        self._client_key = hmac.digest(salted, b"Client Key", "sha256")
        parts = (salt, hashlib.sha256(self._client_key).digest(), hmac.digest(salted, b"Server Key", "sha256"))
        entry = "{}${}:{}${}:{}".format(SCRAM, ITERATIONS, *(base64.b64encode(part).decode() for part in parts))
        (directory / "scram").write_text("".join(f"scram-{number}:{entry}\n" for number in range(count)))
        public = jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        (directory / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "1", "alg": "ES256"}]}))

    def settings(self, *, tls: bool) -> dict[str, str]:
        """Return a gateway's settings."""
        paths = {"PASSWORD_FILE": "passwords", "SCRAM_FILE": "scram", "OAUTH__JWKS_FILE": "jwks.json"}
        if tls:
            paths |= {"TLS_CERT": "server.pem", "TLS_KEY": "server.pem", "TLS_CLIENT_CA": "authority.pem"}
        return {
            "TRIVIUM_SECURITY__OAUTH__ISSUER": ISSUER,
            "TRIVIUM_SECURITY__OAUTH__AUDIENCE": json.dumps([AUDIENCE]),
            **{f"TRIVIUM_SECURITY__{name}": str(self._directory / file) for name, file in paths.items()},
        }

    def _context(self, name: str | None = None) -> ssl.SSLContext:
        """Return a new TLS context, with a certificate for `name`."""
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        if name is not None:
            self._authority.issue_cert("127.0.0.1", common_name=name).configure_cert(context)
        return context

    # one login of each kind, by number

    def anonymous(self, number: int) -> Login:
        """No login, for comparison."""
        return Login(connect_packet(f"anonymous-{number}"))

    def argon2(self, number: int) -> Login:
        """A password with Argon2id."""
        return Login(connect_packet(f"c-{number}", f"human-{number}", PASSWORD))

    def device(self, number: int) -> Login:
        """A device's secret."""
        name = f"device-{number}"
        return Login(connect_packet(name, name, self._secrets[name]))

    def scram(self, number: int) -> Login:
        """SCRAM-SHA-256 (RFC 5802)."""
        first = f"n=scram-{number},r={secrets.token_urlsafe(18)}"

        def answer(challenge: bytes) -> bytes:
            nonce = dict(part.split("=", 1) for part in challenge.decode().split(","))["r"]
            final = f"c=biws,r={nonce}"
            signed = f"{first},{challenge.decode()},{final}".encode()
            signature = hmac.digest(hashlib.sha256(self._client_key).digest(), signed, "sha256")
            proof = bytes(one ^ other for one, other in zip(self._client_key, signature, strict=True))
            return f"{final},p={base64.b64encode(proof).decode()}".encode()

        return Login(connect_packet(f"s-{number}", authentication=(SCRAM, f"n,,{first}".encode())), None, answer)

    def bearer(self, number: int) -> Login:
        """A token (RFC 7628)."""
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": f"token-{number}", "exp": int(time.time()) + 3600}
        token = jwt.encode(claims, self._key, "ES256", {"kid": "1"})
        data = f"n,,\x01auth=Bearer {token}\x01\x01".encode()
        return Login(connect_packet(f"t-{number}", authentication=("OAUTHBEARER", data)))

    def device_with_tls(self, number: int) -> Login:
        """A device's secret over TLS."""
        return self.device(number)._replace(tls=self._context())

    def certificate(self, number: int) -> Login:
        """A client certificate."""
        return Login(connect_packet(f"x-{number}"), self._context(f"certificate-{number}"))


async def log_in(address: tuple[str, int], login: Login) -> None:
    """Log in. Raises ConnectionError if the client is refused."""
    if login.answer is None:
        (await MqttTalk.open(address, login.connect, ssl=login.tls)).drop()
        return
    talk = MqttTalk(*await asyncio.open_connection(*address))
    (body,) = await talk.ask([login.connect], AUTH)
    challenge = body[body.index(b"r=") :]  # behind the method; the data is the last property
    talk.writer.write(auth_packet(SCRAM, login.answer(challenge)))
    (body,) = await talk.take(0x20)
    talk.drop()
    if body[1]:
        raise ConnectionRefusedError(f"0x{body[1]:02x}")
