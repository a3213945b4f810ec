"""`python -m loadtest.scenarios.logins`: the gateway's CPU time for first logins, by kind of login.

Every login is a new MQTT connection of another client, which ends after CONNACK. TLS sessions are not resumed. Linux
only.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import json
import secrets
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import jwt
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pwdlib.hashers.argon2 import Argon2Hasher

from loadtest.beside import in_turn
from loadtest.clients.mqtt_wire import Splitter, auth_packet, connect_packet
from loadtest.gateway import GatewayProcess, process_cpu

SCRAM: Final = "SCRAM-SHA-256"
BEARER: Final = "OAUTHBEARER"
ITERATIONS: Final = 4096  # a cost of the client alone
ISSUER, AUDIENCE = "loadtest", "trivium"
PASSWORD: Final = "a password of a human"
FLEET: Final = 100_000
CONNACK, AUTH = 0x20, 0xF0


class Login(NamedTuple):
    """One client's login: CONNECT, its TLS, and the answer to a challenge."""

    connect: bytes
    tls: ssl.SSLContext | None = None
    answer: Callable[[bytes], bytes] | None = None


class Files:
    """Certificates, keys and users for `count` clients of each kind, and `slow` users with Argon2."""

    def __init__(self, directory: Path, count: int, slow: int) -> None:
        self._directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.authority = self._issue("authority", is_authority=True)
        self._write("authority.pem", self.authority)
        self._write("server.pem", self._issue("127.0.0.1"))
        (directory / "key.pem").write_bytes(
            self.key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self.count = count
        self.secrets = {f"device-{number}": f"tds1_{secrets.token_urlsafe(32)}" for number in range(count)}
        self.humans = [f"human-{number}" for number in range(slow)]
        hashed = Argon2Hasher().hash(PASSWORD)
        lines = [f"{name}:{hashed}\n" for name in self.humans]
        lines += [
            f"{name}:$device-sha256${hashlib.sha256(secret.encode()).hexdigest()}\n"
            for name, secret in self.secrets.items()
        ]
        (directory / "passwords").write_text("".join(lines))
        self._write_scram()
        public = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        (directory / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "1", "alg": "ES256"}]}))

    def settings(self, *, tls: bool) -> dict[str, str]:
        """Return a gateway's settings."""
        paths = {"PASSWORD_FILE": "passwords", "SCRAM_FILE": "scram", "OAUTH__JWKS_FILE": "jwks.json"}
        if tls:
            paths |= {"TLS_CERT": "server.pem", "TLS_KEY": "key.pem", "TLS_CLIENT_CA": "authority.pem"}
        return {
            "TRIVIUM_SECURITY__OAUTH__ISSUER": ISSUER,
            "TRIVIUM_SECURITY__OAUTH__AUDIENCE": json.dumps([AUDIENCE]),
            **{f"TRIVIUM_SECURITY__{name}": str(self._directory / file) for name, file in paths.items()},
        }

    def context(self, name: str | None = None) -> ssl.SSLContext:
        """Return a new TLS context, with a certificate for `name`."""
        context = ssl.create_default_context(cafile=self._directory / "authority.pem")
        if name is not None:
            self._write("client.pem", self._issue(name))
            context.load_cert_chain(self._directory / "client.pem", self._directory / "key.pem")
        return context

    def token(self, name: str) -> str:
        """Return a bearer token."""
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": name, "exp": int(time.time()) + 3600}
        return jwt.encode(claims, self.key, "ES256", {"kid": "1"})

    def _write(self, file: str, certificate: x509.Certificate) -> None:
        (self._directory / file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _issue(self, name: str, *, is_authority: bool = False) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if is_authority else self.authority.subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(
                x509.KeyUsage(True, False, False, False, False, is_authority, is_authority, False, False), critical=True
            )
        )
        return made.sign(self.key, hashes.SHA256())

    def _write_scram(self) -> None:
        """One credential for all users: the gateway's work does not depend on it."""
        self.salt = secrets.token_bytes(16)
        salted = hashlib.pbkdf2_hmac("sha256", PASSWORD.encode(), self.salt, ITERATIONS)
        self.client_key = hmac.digest(salted, b"Client Key", "sha256")
        parts = (self.salt, hashlib.sha256(self.client_key).digest(), hmac.digest(salted, b"Server Key", "sha256"))
        salt, stored, server = (base64.b64encode(part).decode() for part in parts)
        entry = f"{SCRAM}${ITERATIONS}:{salt}${stored}:{server}"
        lines = "".join(f"scram-{number}:{entry}\n" for number in range(self.count))
        (self._directory / "scram").write_text(lines)

    # one login of each kind, by number

    def anonymous(self, number: int) -> Login:
        """No login, for comparison."""
        return Login(connect_packet(f"anonymous-{number}"))

    def argon2(self, number: int) -> Login:
        """A password with Argon2id."""
        return Login(connect_packet(f"c-{number}", self.humans[number], PASSWORD))

    def device(self, number: int) -> Login:
        """A device's secret."""
        name = f"device-{number}"
        return Login(connect_packet(name, name, self.secrets[name]))

    def scram(self, number: int) -> Login:
        """SCRAM-SHA-256 (RFC 5802)."""
        first = f"n=scram-{number},r={secrets.token_urlsafe(18)}"

        def answer(challenge: bytes) -> bytes:
            nonce = dict(part.split("=", 1) for part in challenge.decode().split(","))["r"]
            final = f"c=biws,r={nonce}"
            signed = f"{first},{challenge.decode()},{final}".encode()
            signature = hmac.digest(hashlib.sha256(self.client_key).digest(), signed, "sha256")
            proof = bytes(one ^ other for one, other in zip(self.client_key, signature, strict=True))
            return f"{final},p={base64.b64encode(proof).decode()}".encode()

        return Login(connect_packet(f"s-{number}", authentication=(SCRAM, f"n,,{first}".encode())), None, answer)

    def bearer(self, number: int) -> Login:
        """A token (RFC 7628)."""
        data = f"n,,\x01auth=Bearer {self.token(f'token-{number}')}\x01\x01".encode()
        return Login(connect_packet(f"t-{number}", authentication=(BEARER, data)))

    def device_with_tls(self, number: int) -> Login:
        """A device's secret over TLS."""
        return self.device(number)._replace(tls=self.context())

    def certificate(self, number: int) -> Login:
        """A client certificate."""
        return Login(connect_packet(f"x-{number}"), self.context(f"certificate-{number}"))


async def log_in(address: tuple[str, int], login: Login) -> None:
    """Log in. Raises RuntimeError if the client is refused."""
    reader, writer = await asyncio.open_connection(*address, ssl=login.tls)
    try:
        writer.write(login.connect)
        splitter = Splitter()
        while True:
            data = await reader.read(65536)
            if not data:
                raise RuntimeError("the gateway closed the connection")
            for first, body in splitter.feed(data):
                if first == CONNACK and body[1] == 0:
                    return
                if first != AUTH or login.answer is None:
                    raise RuntimeError(f"the answer is 0x{first:02x} {body[:2].hex()}")
                challenge = body[body.index(b"r=") :]  # behind the method; the data is the last property
                writer.write(auth_packet(SCRAM, login.answer(challenge)))
    finally:
        writer.close()


async def measure(gateway: GatewayProcess, what: str, make: Callable[[int], Login], count: int) -> None:
    """Log `count` clients in and print the gateway's CPU time."""
    before, began = process_cpu(gateway.pid), time.perf_counter()
    await in_turn(range(count), lambda number: log_in(gateway.address("mqtt"), make(number)))
    spent, took = process_cpu(gateway.pid) - before, time.perf_counter() - began
    each = spent / count
    print(f"{what:24}{count:8}{spent:10.2f}{each * 1e3:14.3f}{each * FLEET:12.0f}{took:10.1f}", flush=True)


@contextlib.asynccontextmanager
async def running(gateway: GatewayProcess) -> AsyncIterator[GatewayProcess]:
    """Run a gateway during the block."""
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kind of login, with and without TLS."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", help="Kafka, HOST:PORT; default: the embedded one")
    parser.add_argument("--logins", type=int, default=10_000, help="of each fast kind (default 10,000)")
    parser.add_argument("--slow", type=int, default=200, help="with Argon2id (default 200)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        files = Files(path, given.logins, given.slow)
        print(f"{'login':24}{'number':>8}{'CPU s':>10}{'CPU ms each':>14}{f'{FLEET:,}: s':>12}{'took s':>10}")
        plain = GatewayProcess(path / "plain", given.bootstrap, environment=files.settings(tls=False))
        async with running(plain) as gateway:
            await measure(gateway, "anonymous", files.anonymous, given.logins)
            await measure(gateway, "Argon2id, 64 MiB", files.argon2, given.slow)
            await measure(gateway, "device secret", files.device, given.logins)
            await measure(gateway, "SCRAM-SHA-256", files.scram, given.logins)
            await measure(gateway, "token, ES256", files.bearer, given.logins)
            secured = GatewayProcess(path / "tls", gateway.kafka, environment=files.settings(tls=True))
            async with running(secured) as other:
                await measure(other, "device secret, TLS", files.device_with_tls, given.logins)
                await measure(other, "certificate, TLS", files.certificate, given.logins)


if __name__ == "__main__":
    uvloop.run(main())
