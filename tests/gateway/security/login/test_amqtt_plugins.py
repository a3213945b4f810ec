"""amqtt's SQL and HTTP plugins by configuration, and what a configuration can get wrong."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator
from gateway.settings.config import ConfigError, SecurityConfig
from tests.support.listeners import entrance

SQL = "amqtt.contrib.auth_db.UserAuthDBPlugin"
HTTP = "amqtt.contrib.http.UserAuthHttpPlugin"
LDAP = "amqtt.contrib.ldap.UserAuthLdapPlugin"
JWT = "amqtt.contrib.jwt.UserAuthJwtPlugin"


def configured(plugin: str, **options: Any) -> SecurityConfig:
    return SecurityConfig(allow_anonymous=False, failed_attempt_delay_s=0, plugins={plugin: options})


@pytest.fixture
async def users(tmp_path: Path) -> str:
    """A SQLite database created by amqtt's own manager, with the user ann."""
    from amqtt.contrib.auth_db.managers import UserManager

    connection = f"sqlite+aiosqlite:///{tmp_path / 'users.db'}"
    async with UserManager(connection) as manager:
        await manager.db_sync()
        await manager.create_user_auth("ann", "secret")
    return connection


async def test_sql(users: str) -> None:
    authenticator = Authenticator(configured(SQL, connection=users))
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", b"secret", peer="") == Identity("ann", "password")
    assert await authenticator.authenticate_password("ann", "wrong", peer="") is None
    assert await authenticator.authenticate_password("bob", "secret", peer="") is None
    assert authenticator.statistics().errors_total == 0
    await authenticator.stop()


async def test_sql_makes_its_tables_when_told(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    authenticator = Authenticator(configured(SQL, connection=f"sqlite+aiosqlite:///{path}", sync_schema=True))
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", "secret", peer="") is None
    assert authenticator.statistics().errors_total == 0
    await authenticator.stop()


async def test_sql_without_its_tables_refuses_and_counts(tmp_path: Path) -> None:
    authenticator = Authenticator(configured(SQL, connection=f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}"))
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", "secret", peer="") is None
    assert authenticator.statistics().errors_total == 1
    await authenticator.stop()


class Judge:
    """An HTTP service that accepts ann."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        offered = dict(await request.post()) if request.method == "POST" else await request.json()
        self.asked.append(offered)
        right = offered["username"] == "ann" and offered["password"] == "secret"
        return web.json_response({"ok": right}, status=self.status)


@pytest.fixture
async def judge() -> Judge:
    return Judge()


@pytest.fixture
async def service(judge: Judge) -> AsyncIterator[TestServer]:
    app = web.Application()
    app.router.add_route("*", "/user", judge.answer)
    async with TestServer(app) as server:
        yield server


@pytest.mark.parametrize("options", [{}, {"request_method": "post", "params_mode": "form", "user_uri": "/user"}])
async def test_http(judge: Judge, service: TestServer, options: dict[str, Any]) -> None:
    authenticator = Authenticator(configured(HTTP, host=service.host, port=service.port, **options))
    await authenticator.start()
    ann = await authenticator.authenticate_password("ann", "secret", peer="", client_id="c1")
    assert ann == Identity("ann", "password")
    assert judge.asked == [{"username": "ann", "password": "secret", "client_id": "c1"}]
    assert await authenticator.authenticate_password("ann", "wrong", peer="") is None
    judge.status = 500
    assert await authenticator.authenticate_password("ann", "secret too", peer="") is None
    await service.close()
    assert await authenticator.authenticate_password("ann", "secret three", peer="") is None
    assert authenticator.statistics().errors_total == 1
    await authenticator.stop()


async def test_jwt() -> None:
    import jwt

    key = "k" * 32
    authenticator = Authenticator(configured(JWT, secret_key=key, user_claim="sub"))
    await authenticator.start()
    token = jwt.encode({"sub": "ann"}, key, algorithm="HS256")
    assert await authenticator.authenticate_password("ann", token, peer="") == Identity("ann", "password")
    assert await authenticator.authenticate_password("bob", token, peer="") is None
    expired = jwt.encode({"sub": "ann", "exp": 1}, key, algorithm="HS256")
    assert await authenticator.authenticate_password("ann", expired, peer="") is None
    await authenticator.stop()


@pytest.mark.parametrize(
    ("plugin", "options", "complaint"),
    [
        ("Plugin", {}, "expected a dotted class name"),
        ("amqtt.contrib.nothing.Plugin", {}, "no module named amqtt.contrib.nothing"),
        ("amqtt.contrib.http.Nothing", {}, "module amqtt.contrib.http has no Nothing"),
        ("amqtt.contrib.http.logger", {}, "not a class"),
        ("amqtt.contrib.http.TopicAuthHttpPlugin", {}, "not an authentication plugin"),
        ("amqtt.plugins.authentication.AnonymousAuthPlugin", {}, "use security.allow_anonymous"),
        ("amqtt.contrib.cert.UserAuthCertPlugin", {"uri_domain": "x"}, "use security.tls_client_ca"),
        (HTTP, {"host": "h"}, ".port is missing"),
        (HTTP, {"host": "h", "port": "hunter2"}, ".port has the wrong type"),
        (HTTP, {"host": "h", "port": 1, "pot": "hunter2"}, "unknown key pot"),
        (HTTP, {"host": "h", "port": 1, "request_method": "hunter2"}, "is not valid"),
    ],
)
def test_bad_configurations_name_the_key(plugin: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Authenticator(configured(plugin, **options))
    assert str(caught.value).startswith(f'security.plugins."{plugin}"')
    assert complaint in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ldap(name: str, *rest: Any) -> Any:
        if name == "ldap":
            raise ModuleNotFoundError("No module named 'ldap'", name="ldap")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "amqtt.contrib.ldap", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_ldap)
    with pytest.raises(ConfigError, match="needs the Python package 'ldap', which is not installed"):
        Authenticator(configured(LDAP, server="ldap://127.0.0.1", base_dn="", user_attribute="uid"))


async def test_a_name_is_no_ldap_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """amqtt's plugin does not escape the name in its search filter, which RFC 4515 part 3 requires."""
    filters: list[str] = []

    class Directory:
        def simple_bind_s(self, who: str, password: str) -> None:
            assert password, "an empty password is an anonymous bind, which succeeds (RFC 4513 part 5.1.2)"

        def search_s(self, base: str, scope: int, search_filter: str, attributes: list[str]) -> list[tuple[str]]:
            filters.append(search_filter)
            return [("cn=ann",)] if search_filter in ("(uid=ann)", "(uid=*)") else []

    class LdapError(Exception):
        pass

    library = types.ModuleType("ldap")
    vars(library).update(
        initialize=lambda server: Directory(), VERSION3=3, SCOPE_SUBTREE=2,
        LDAPError=LdapError, INVALID_CREDENTIALS=LdapError,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ldap", library)
    monkeypatch.delitem(sys.modules, LDAP.rpartition(".")[0], raising=False)
    options = {"server": "", "base_dn": "", "user_attribute": "uid", "bind_dn": "x", "bind_password": "x"}
    authenticator = Authenticator(configured(LDAP, **options))
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", "secret", peer="") == Identity("ann", "password")
    assert await authenticator.authenticate_password("ann", "", peer="") is None
    assert await authenticator.authenticate_password("*", "secret", peer="") is None
    assert await authenticator.authenticate_password("a*(b)\\", "secret", peer="") is None
    assert filters == ["(uid=ann)", r"(uid=a\2a\28b\29\5c)"]
    await authenticator.stop()
    sys.modules.pop(LDAP.rpartition(".")[0])


async def test_a_missing_data_base_driver_is_named() -> None:
    authenticator = Authenticator(configured(SQL, connection="postgresql+asyncpg://u:hunter2@127.0.0.1/db"))
    with pytest.raises(ConfigError, match="asyncpg") as caught:
        await authenticator.start()
    assert "hunter2" not in str(caught.value)


async def test_a_plugin_that_does_not_start_stops_the_start() -> None:
    authenticator = Authenticator(configured(SQL, connection="no connection: hunter2"))
    with pytest.raises(ConfigError, match="did not start") as caught:
        await authenticator.start()
    assert "hunter2" not in str(caught.value)


def test_plugins_are_read_from_the_configuration_file() -> None:
    parsed = TypeAdapter(SecurityConfig).validate_python({"plugins": {HTTP: {"host": "127.0.0.1", "port": 1}}})
    assert "PLAIN" in entrance(Authenticator(parsed)).offers()
