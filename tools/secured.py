"""Secured listeners for brokers on this machine, for testing logins and ACLs: `make cluster ARGS=--secured`.

In addition to its plain listener, on which every client is the administrator, a broker has

- `TLS`: requires a client certificate; the principal is its common name;
- `SASL`: over TLS: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, and OAUTHBEARER with unsigned tokens;
- `TOKENS`: over TLS: OAUTHBEARER with tokens that are signed by the key in `issuer.pem`.

Clients of these listeners have no rights except by ACLs. Keys and passwords are created once and kept.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from jwt.algorithms import RSAAlgorithm

from gateway.embedded.storage import HOST

LISTENERS: Final = ("TLS", "SASL", "TOKENS")
USER: Final = "gateway"
"""The common name of the client certificate, and a user of PLAIN and SCRAM."""
CLIENTS: Final = ("ann", "bob")
"""More users of PLAIN and SCRAM, with the same password, for testing ACLs of a gateway's clients."""
ISSUER: Final = "https://issuer.example"
AUDIENCE: Final = "kafka"
KEY_ID: Final = "issuer"
YEARS: Final = 10

_MODULES: Final = "org.apache.kafka.common.security"
_TOKENS_MODULE: Final = f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required"


class Secured:
    """The keys, passwords and settings.

    Attributes:
        ca, certificate, key: PEM files for a client: the authority, its certificate and its key.
    """

    def __init__(self, directory: Path) -> None:
        """Nothing is written before `prepare`."""
        self._directory = directory.absolute()
        self.ca = self._directory / "ca.pem"
        self.certificate = self._directory / "client.pem"
        self.key = self._directory / "client.key"
        self._issuer = self._directory / "issuer.pem"

    @property
    def password(self) -> str:
        """The password of `USER` and `CLIENTS`."""
        return (self._directory / "password").read_text().strip()

    def prepare(self) -> None:
        """Create all files unless they exist."""
        if self._issuer.exists():
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        authority = Authority()
        self.ca.write_bytes(authority.pem)
        server_key, server = authority.issue("localhost", server=True)
        self._write("broker.pem", server_key + server + authority.pem)
        client_key, client = authority.issue(USER)
        self._write("client.key", client_key)
        self.certificate.write_bytes(client)
        self._write("password", secrets.token_urlsafe(18).encode())
        issuer = rsa.generate_private_key(65537, 2048)
        public = RSAAlgorithm.to_jwk(issuer.public_key(), as_dict=True)
        keys = {"keys": [{**public, "kid": KEY_ID, "use": "sig", "alg": "RS256"}]}
        (self._directory / "keys.json").write_text(json.dumps(keys))
        self._write("issuer.pem", _private(issuer))

    def write_config(self, servers: str) -> Path:
        """Write a `trivium.toml` with which a gateway logs in as `USER` at the SASL listener; return its path."""
        text = f"""\
[kafka]
bootstrap_servers = "{servers}"
security_protocol = "SASL_SSL"
sasl_mechanism = "SCRAM-SHA-512"
sasl_username = "{USER}"
sasl_password_file = "{self._directory / "password"}"
ssl_cafile = "{self.ca}"
create_topics = true
"""
        self._write("trivium.toml", text.encode())
        return self._directory / "trivium.toml"

    def _write(self, name: str, content: bytes) -> None:
        """Write a file that only its owner may read."""
        path = self._directory / name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)

    def token(self, lasts_s: float = 3600, *, signed: bool = True, name: str = USER) -> str:
        """Create a token for `TOKENS`, or an unsigned one for `SASL`."""
        now = time.time()
        claims: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "sub": name, "iat": now, "exp": now + lasts_s}
        if signed:
            return jwt.encode(claims, self._issuer.read_bytes(), "RS256", headers={"kid": KEY_ID})
        return jwt.encode(claims, "", "none")

    @property
    def java_options(self) -> Sequence[str]:
        """Java options that allow Kafka to read the signing keys from `keys.json`."""
        return (f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self._keys_url}",)

    @property
    def _keys_url(self) -> str:
        return (self._directory / "keys.json").as_uri()

    @property
    def format_options(self) -> Sequence[str]:
        """Options for formatting the storage, which holds the SCRAM users."""
        words = []
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            for user in (USER, *CLIENTS):
                words += ["--add-scram", f"{mechanism}=[name={user},password={self.password}]"]
        return words

    def settings(self, port: int, controller_port: int, ports: Mapping[str, int]) -> dict[str, str]:
        """Return the broker's settings; `ports` has a port for each of `LISTENERS`."""
        addresses = {"PLAINTEXT": port, **ports}
        advertised = [f"{name}://{HOST}:{number}" for name, number in addresses.items()]
        scram = f"{_MODULES}.scram.ScramLoginModule required;"
        sasl, tokens = "listener.name.sasl", "listener.name.tokens"
        users = " ".join(f'user_{user}="{self.password}"' for user in (USER, *CLIENTS))
        return {
            "listeners": ",".join([*advertised, f"CONTROLLER://{HOST}:{controller_port}"]),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,SASL:SASL_SSL,TOKENS:SASL_SSL"
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",  # clients of the plain listener
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._directory / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca),
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/,DEFAULT",
            "listener.name.tls.ssl.client.auth": "required",
            f"{sasl}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            f"{sasl}.plain.sasl.jaas.config": (f"{_MODULES}.plain.PlainLoginModule required {users};"),
            f"{sasl}.scram-sha-256.sasl.jaas.config": scram,
            f"{sasl}.scram-sha-512.sasl.jaas.config": scram,
            f"{sasl}.oauthbearer.sasl.jaas.config": f'{_TOKENS_MODULE} unsecuredLoginStringClaim_sub="nobody";',
            f"{tokens}.sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{tokens}.oauthbearer.sasl.jaas.config": f"{_TOKENS_MODULE};",
            f"{tokens}.oauthbearer.sasl.server.callback.handler.class": (
                f"{_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            f"{tokens}.oauthbearer.sasl.oauthbearer.jwks.endpoint.url": self._keys_url,
            f"{tokens}.oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
            f"{tokens}.oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
        }


class Authority:
    """Issues certificates.

    Attributes:
        pem: its own certificate.
    """

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test cluster")])
        builder = self._builder(self._name, self._key.public_key(), YEARS * 365)
        certificate = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True
        )
        self.pem = certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, *, server: bool = False, days: float = YEARS * 365) -> tuple[bytes, bytes]:
        """Return a key and a certificate for `name`, in PEM. With negative `days` it has expired that long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        use = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address(HOST))] if server else [x509.DNSName(name)]
        builder = (
            self._builder(subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        return _private(key), builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(self, subject: x509.Name, key: Any, days: float) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, now + timedelta(days=days)) - timedelta(days=1))
            .not_valid_after(now + timedelta(days=days))
        )


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
