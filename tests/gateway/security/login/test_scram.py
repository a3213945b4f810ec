"""SCRAM with the RFCs' vectors, with another implementation's client, and with arbitrary messages."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import pytest
from aiokafka.conn import ScramAuthenticator
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.identity import Identity
from gateway.security.login.exchange import Continue, Done, Failed
from gateway.security.login.scram import MECHANISMS, MESSAGE_LIMIT, ScramCredential, ScramServer, derive

SHA_256 = "SCRAM-SHA-256"
SALT = b"0123456789abcdef"
NONCE = "server"
ANN = derive(SHA_256, "secret", SALT, 4096)


def server(credential: ScramCredential = ANN, mechanism: str = SHA_256) -> ScramServer:
    return ScramServer(mechanism, lambda _: credential, NONCE)


def proof(said: str, credential_of: str = "secret") -> str:
    """A client's proof, computed independently."""
    salted = hashlib.pbkdf2_hmac("sha256", credential_of.encode(), SALT, 4096)
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(key).digest(), said.encode(), "sha256")
    return base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()


def final(first_bare: str, binding: str = "biws", nonce: str = f"c{NONCE}", extension: str = "") -> bytes:
    """A correct client-final message for `server()`."""
    answer = f"r=c{NONCE},s={base64.b64encode(SALT).decode()},i=4096"
    without = f"c={binding},r={nonce}{extension}"
    return f"{without},p={proof(f'{first_bare},{answer},{without}')}".encode()


RIGHT = final("n=ann,r=c")


def test_the_exchange_of_rfc_7677() -> None:
    credential = derive(SHA_256, "pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)
    asked: list[str] = []

    def look_up(name: str) -> ScramCredential:
        asked.append(name)
        return credential

    exchange = ScramServer(SHA_256, look_up, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    assert exchange.step(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == Continue(
        f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    )
    assert asked == ["user"]
    last = f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert exchange.step(last.encode()) == Done(
        Identity("user", "scram"), b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    )
    assert exchange.step(last.encode()) == Failed("the exchange is over")


def foreign_client(mechanism: str, user: str, password: str) -> Any:
    return ScramAuthenticator(
        loop=None,
        sasl_plain_password=password,
        sasl_plain_username=user,
        sasl_mechanism=mechanism,
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("user", ["ann", "a,n=n", "=2C", "Zoë"])
def test_a_foreign_client(mechanism: str, user: str) -> None:
    """aiokafka's client, which works with Kafka, and our server accept each other."""
    credential = derive(mechanism, "secret", SALT, 5000)
    for password in ("secret", "wrong"):
        client = foreign_client(mechanism, user, password)
        exchange = server(credential, mechanism)
        challenge = exchange.step(client.first_message().encode())
        assert isinstance(challenge, Continue)
        client.process_server_first_message(challenge.data.decode())
        verdict = exchange.step(client.final_message().encode())
        if password == "wrong":
            assert verdict == Failed("user name or password is wrong")
        else:
            assert isinstance(verdict, Done)
            assert verdict.identity.name == user
            client.process_server_final_message(verdict.data.decode())


@pytest.mark.parametrize(
    ("first", "bare", "binding"),
    [
        ("n,,", "n=ann,r=c", "n,,"),
        ("y,,", "n=ann,r=c", "y,,"),
        ("n,a=ann,", "n=ann,r=c", "n,a=ann,"),
        ("n,,", "n=ann,r=c,x=later", "n,,"),
        ("n,,", "n=a\u00adnn,r=c", "n,,"),
        ("n,a=ann,", "n=\uff41nn,r=c", "n,a=ann,"),
    ],
)
def test_what_a_client_may_say(first: str, bare: str, binding: str) -> None:
    exchange = server()
    assert isinstance(exchange.step((first + bare).encode()), Continue)
    encoded = base64.b64encode(binding.encode()).decode()
    verdict = exchange.step(final(bare, encoded, extension=",z=ignored"))
    assert isinstance(verdict, Done)
    assert verdict.identity.name == "ann"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (b"", "GS2 header is missing"),
        (b"n", "no name or nonce"),
        (b"n=ann,r=c", "GS2 header is missing"),
        (b"p=tls-unique,,n=ann,r=c", "channel binding"),
        (b"x,,n=ann,r=c", "GS2 header is missing"),
        (b"n,a=bob,n=ann,r=c", "authorization"),
        (b"n,bob,n=ann,r=c", "attribute a"),
        (b"n,,m=must,n=ann,r=c", "mandatory"),
        (b"n,,n=ann", "no name or nonce"),
        (b"n,,r=c,n=ann", "attribute n"),
        (b"n,,n=,r=c", "attribute n"),
        (b"n,,n=ann,r=", "attribute r"),
        (b"n,,n=ann,r=c c", "printable"),
        ("n,,n=ann,r=é".encode(), "printable"),
        (b"n,,n=a=nn,r=c", "equals"),
        (b"n,,n==2D,r=c", "equals"),
        (b"n,,n==3d,r=c", "equals"),
        (b"n,,n=a\0nn,r=c", "prohibited"),
        ("n,,n=\u00ad,r=c".encode(), "name is empty"),
        (b"n,,n=\xff,r=c", "UTF-8"),
        (b"n,,n=ann,r=" + b"c" * MESSAGE_LIMIT, "too long"),
    ],
)
def test_first_messages_that_are_refused(message: bytes, complaint: str) -> None:
    step = server().step(message)
    assert isinstance(step, Failed)
    assert complaint in step.reason


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (b"", "no binding"),
        (b"c=biws", "no binding"),
        (RIGHT.partition(b",p=")[0], "no binding"),
        (RIGHT.replace(b",p=", b",q="), "no binding"),
        (RIGHT + b"=", "base64"),
        (RIGHT.replace(b"biws", b"!!!!"), "base64"),
        (f"c=biws,r=c{NONCE},p=AAAA".encode(), "wrong length"),
        (f"c=biws,r=c{NONCE},p=".encode(), "wrong length"),
        (final("n=ann,r=c", "eSws"), "GS2 header has changed"),  # y,, after n,,: somebody in between
        (final("n=ann,r=c", nonce="c"), "nonce has changed"),
        (final("n=ann,r=c", nonce=f"x{NONCE}"), "nonce has changed"),
        (final("n=bob,r=c"), "wrong"),
        (RIGHT.replace(b",p=", b",x=1,p="), "wrong"),
        (b"r" + RIGHT[1:], "attribute c"),
    ],
)
def test_final_messages_that_are_refused(message: bytes, complaint: str) -> None:
    exchange = server()
    exchange.step(b"n,,n=ann,r=c")
    step = exchange.step(message)
    assert isinstance(step, Failed)
    assert complaint in step.reason
    assert exchange.step(RIGHT) == Failed("the exchange is over")


@given(st.lists(st.binary() | st.text().map(str.encode), max_size=4))
def test_no_message_raises(messages: list[bytes]) -> None:
    exchange = server()
    for message in messages:
        assert not isinstance(exchange.step(message), Done)


ATTRIBUTES = st.lists(
    st.builds("{}={}".format, st.sampled_from("nracpm"), st.text(max_size=6)) | st.text(max_size=4), max_size=5
).map(",".join)


@given(st.sampled_from(["n", "y", "p=x", ""]), ATTRIBUTES, ATTRIBUTES)
def test_nothing_but_the_proof_proves(flag: str, first: str, last: str) -> None:
    exchange = server()
    assert not isinstance(exchange.step(f"{flag},{first}".encode(errors="replace")), Done)
    assert not isinstance(exchange.step(last.encode(errors="replace")), Done)


def test_few_iterations_and_unfit_passwords_make_no_credential() -> None:
    with pytest.raises(ValueError, match="4096"):
        derive(SHA_256, "secret", SALT, 4095)
    with pytest.raises(ValueError, match="prohibited"):
        derive(SHA_256, "se\0cret", SALT, 4096)


def test_a_credential_shows_no_key() -> None:
    assert repr(ANN) == str(ANN) == "ScramCredential(iterations=4096)"
