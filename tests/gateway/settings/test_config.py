"""The configuration: its order of precedence, and that a bad value stops the start with an error that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.process.ports import check_ports
from gateway.settings.config import Address, ConfigError, load


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "some.toml"
    path.write_text('[mqtt]\nreceive_maximum = 10\nmax_packet_bytes = 5000\n[http]\naddress = "127.0.0.1:1"\n')
    return path


def test_file_then_environment_then_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVIUM_MQTT__MAX_PACKET_BYTES", "6000")
    monkeypatch.setenv("TRIVIUM_HTTP__ADDRESS", "127.0.0.1:2")
    config = load(file, {"http": {"address": "127.0.0.1:3"}, "amqp": {"address": None}})
    assert config.mqtt.receive_maximum == 10
    assert config.mqtt.max_packet_bytes == 6000
    assert config.http.address == "127.0.0.1:3"
    assert config.amqp.address == "127.0.0.1:5672"


def test_trivium_toml_in_the_working_directory_is_the_default_file(file: Path) -> None:
    Path("trivium.toml").write_text("[mqtt]\nreceive_maximum = 99\n")
    assert load().mqtt.receive_maximum == 99
    assert load(file).mqtt.receive_maximum == 10


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mqtt": {"receive_maximum": 0}}, ["mqtt.receive_maximum", "greater than or equal to 1", "got 0"]),
        ({"mqtt": {"adress": "x"}}, ["mqtt.adress", "not permitted"]),
        ({"amqp": {"address": "nowhere"}}, ["amqp.address", "HOST:PORT"]),
        ({"http": {"address": "h:99999"}}, ["http.address", "HOST:PORT"]),
        ({"http": {"address": "::1:8080"}}, ["http.address", "in brackets"]),
        ({"http": {"address": "[localhost]:8080"}}, ["http.address", "in brackets"]),
        ({"security": {"tls_cert": "a"}}, ["security", "tls_cert and tls_key go together"]),
        ({"kafka": {"linger_ms": -1}, "mqtt": {"receive_maximum": 0}}, ["kafka.linger_ms", "mqtt.receive_maximum"]),
    ],
)
def test_a_bad_value_names_its_key(file: Path, flags: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, flags)
    for word in words:
        assert word in str(caught.value)


def test_a_bad_password_is_not_repeated(file: Path) -> None:
    file.write_text("[kafka]\nsasl_password = 12345\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "sasl_password" in str(caught.value)
    assert "12345" not in str(caught.value)


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("a = [")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        load(tmp_path / "bad.toml")


def test_the_configuration_is_frozen(file: Path) -> None:
    config = load(file)
    with pytest.raises(ValidationError):
        config.mqtt.receive_maximum = 5


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [("127.0.0.1:0", "127.0.0.1", 0, True), ("[::1]:5", "::1", 5, True), ("0.0.0.0:1", "0.0.0.0", 1, False),
     ("localhost:7", "localhost", 7, True), ("gateway.example:7", "gateway.example", 7, False)],
)  # fmt: skip
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)


def test_topics_are_created_only_on_the_embedded_broker_by_default(file: Path) -> None:
    assert load(file).creates_topics
    assert not load(file, {"kafka": {"bootstrap_servers": "h:1"}}).creates_topics
    assert load(file, {"kafka": {"bootstrap_servers": "h:1", "create_topics": True}}).creates_topics


@pytest.mark.parametrize("servers", ["kafka", "kafka:", ":9092", "a:9092,b", "a:9092,", "a:0", "a:x", ""])
def test_a_bootstrap_server_without_a_port_is_refused(servers: str) -> None:
    with pytest.raises(ConfigError, match=r"^kafka\.bootstrap_servers: expected HOST:PORT"):
        load(flags={"kafka": {"bootstrap_servers": servers}})


def test_valid_bootstrap_servers_are_accepted() -> None:
    for servers in ("a:9092", "a:9092, b:9093", "[::1]:9092"):
        assert load(flags={"kafka": {"bootstrap_servers": servers}}).kafka.bootstrap_servers == servers


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({"mqtt": {"address": "127.0.0.1:5672"}}, ("mqtt.address", "amqp.address", "5672")),
        ({"http": {"address": "0.0.0.0:9092"}}, ("http.address", "embedded.port", "9092")),
        ({"management": {"address": "localhost:8080"}}, ("http.address", "management.address", "8080")),
        ({"mqtt": {"websocket_address": "0.0.0.0:8080"}}, ("mqtt.websocket_address", "http.address", "8080")),
    ],
)
def test_one_port_twice_is_refused_and_both_keys_are_named(flags: dict[str, object], keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ports(load(flags=flags))
    for key in keys:
        assert key in str(caught.value)


def test_free_ports_and_ports_of_other_addresses_do_not_collide() -> None:
    check_ports(load())
    check_ports(load(flags={"mqtt": {"address": "127.0.0.1:0"}, "amqp": {"address": "127.0.0.1:0"}}))
    check_ports(load(flags={"mqtt": {"address": "127.0.0.2:5672"}}))
    check_ports(load(flags={"kafka": {"bootstrap_servers": "h:9092"}, "http": {"address": "127.0.0.1:9092"}}))


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TRIVIUM_MQTT__ADRESS", "TRIVIUM_MQTT__ADDRESS"),
        ("TRIVIUM_MQTT_ADDRESS", "TRIVIUM_MQTT__ADDRESS"),
        ("TRIVIUM_KAFKA__BOOTSTRAP_SERVER", "TRIVIUM_KAFKA__BOOTSTRAP_SERVERS"),
        ("TRIVIUM_DATADIR", "TRIVIUM_DATA_DIR"),
        ("TRIVUM_MQTT__ADDRESS", "TRIVIUM_MQTT__ADDRESS"),
        ("TRIVIM_KAFKA__BOOTSTRAP_SERVERS", "TRIVIUM_KAFKA__BOOTSTRAP_SERVERS"),
    ],
)
def test_a_misspelled_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ConfigError, match=rf"^{variable}: there is no such key \(did you mean {meant}\?\)$"):
        load()


def test_other_programs_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PREMIUM_MQTT__ADDRESS", "TRIVUM_HOME", "TRIVUM_MQTT__NOTHING", "MQTT__ADDRESS", "TRIVIA_X__Y"):
        monkeypatch.setenv(variable, "x")
    load()


def test_a_misspelled_key_is_refused_with_the_nearest_name(file: Path) -> None:
    file.write_text("[mqtt]\nadress = 1\n")
    with pytest.raises(ConfigError, match=r"did you mean mqtt\.address\?"):
        load(file)


def test_variables_of_kubernetes_services_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in (
        "TRIVIUM_CACHE",
        "TRIVIUM_NATIVE",
        "TRIVIUM_SERVICE_HOST",
        "TRIVIUM_PORT",
        "TRIVIUM_PORT_1883_TCP_ADDR",
    ):
        monkeypatch.setenv(variable, "x")
    monkeypatch.setenv("TRIVIUM_SECURITY__PLUGINS", '{"a.B": {"c": 1}}')
    monkeypatch.setenv("trivium_log__level", "debug")
    assert load().log.level == "debug"
