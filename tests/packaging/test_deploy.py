"""deploy: the chart renders, all manifests are valid and consistent, and every configuration in them is valid."""

from __future__ import annotations

import configparser
import importlib.util
import json
import shutil
import subprocess
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import promql_parser as promql
import pytest
import trustme
import yaml
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from gateway.process.app import check
from gateway.settings.config import Config, load
from tests.interop.fetch import HELM
from tests.interop.toolchains import ToolchainError, go_program
from tests.packaging.test_dashboards import labels_of
from tests.support.assembled import assembled
from tools import dashboards, strimzi

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kustomize" / "base"
KUBERNETES = "1.37"
SECRETS = "/run/secrets/trivium"
PASSWORD = "ann:$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHRzb21lc2FsdA$qtFs4VBpqRh4vQKqpVuZMm0DwnoLxjDMp3F2mMbnyYc\n"
EVERYTHING: dict[str, Any] = {
    "replicas": 5,
    "config": {
        "kafka": {"bootstrap_servers": "kafka-1:9093", "security_protocol": "SASL_SSL", "sasl_username": "trivium"},
        "mqtt": {"websocket_address": "0.0.0.0:9001"},
        "mapping": {"rules": [{"mqtt": "a/{b}/#", "topic": "a-{b}", "key": "x"}]},
        "budget": {"process_bytes": 536870912},
        "drain": {"limit_s": 60.5},
    },
    "tls": {"secret": "trivium-tls"},
    "env": [
        {"name": "TRIVIUM_KAFKA__SASL_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "kafka", "key": "password"}}}
    ],
    "image": {"pullSecrets": ["registry"]},
    "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "annotations": {"a": "b"}},
    "extraVolumes": [{"name": "devices", "persistentVolumeClaim": {"claimName": "devices", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "devices", "mountPath": "/run/devices", "readOnly": True}],
    "extraPorts": [{"name": "mqtt-ws", "port": 9001}],
    "persistence": {"storageClass": "fast"},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "gateway", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "basicAuthSecret": "prometheus"},
    "prometheusRule": {"enabled": True, "runbooks": "https://wiki.example/trivium/"},
    "keda": {"enabled": True},
}
Manifests = dict[tuple[str, str], dict[str, Any]]


def rendered(tmp: Path, *values: dict[str, Any]) -> list[Manifests]:
    """Render the chart with each of these values."""
    files = [tmp / f"values-{number}.yaml" for number in range(len(values))]
    for file, one in zip(files, values, strict=True):
        file.write_text(yaml.safe_dump(one), encoding="utf-8")
    try:
        program = go_program(HELM)
    except ToolchainError as error:
        pytest.skip(str(error))
    command = [str(program), str(DEPLOY / "helm" / "trivium"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [by_kind(text for name, text in one.items() if name.endswith(".yaml")) for one in json.loads(done.stdout)]


def by_kind(texts: Any) -> Manifests:
    found = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifests, Manifests]:
    """Render the chart with its default values, and with every feature on."""
    plain, everything = rendered(tmp_path_factory.mktemp("values"), {}, EVERYTHING)
    return plain, everything


@pytest.fixture(scope="module")
def base() -> Manifests:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text(encoding="utf-8"))
    assert kustomization.keys() == {"apiVersion", "kind", "resources", "configMapGenerator", "images"}
    written = {path.name for path in BASE.iterdir()}
    [generated] = kustomization["configMapGenerator"]
    assert written == {"kustomization.yaml", *kustomization["resources"], *generated["files"]}
    found = by_kind((BASE / name).read_text(encoding="utf-8") for name in kustomization["resources"])
    data = {name: (BASE / name).read_text(encoding="utf-8") for name in generated["files"]}
    name = generated["name"]
    found["ConfigMap", name] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    return found


def without_helm(manifests: Manifests) -> Manifests:
    """Remove Helm's labels and parse the configuration, to compare the manifests."""
    manifests = json.loads(json.dumps(list(manifests.values())))
    for one in manifests:
        labels = one["metadata"].get("labels", {})
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"):
            labels.pop(label, None)
        if one["kind"] == "ConfigMap":
            one["metadata"].pop("labels", None)
            one["data"] = {name: tomllib.loads(text) for name, text in one["data"].items()}
        if one["kind"] == "StatefulSet":
            one["spec"]["template"]["metadata"].pop("annotations", None)
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


def test_the_plain_manifests_are_those_of_the_chart(charts: tuple[Manifests, Manifests], base: Manifests) -> None:
    assert without_helm(base) == without_helm(charts[0])


def test_manifests_are_valid(charts: tuple[Manifests, Manifests], base: Manifests) -> None:
    own = yaml.safe_load((Path(__file__).with_name("custom_resources.yaml")).read_text(encoding="utf-8"))
    topics = by_kind([(DEPLOY / "strimzi" / name).read_text() for name in ("kafkauser.yaml", "kafkatopics.yaml")])
    seen = set()
    for one in (*base.values(), *charts[0].values(), *charts[1].values(), *topics.values()):
        seen.add(one["kind"])
        if one["kind"] in own:
            jsonschema_rs.validator_for(own[one["kind"]]).validate(one)
        else:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    assert seen >= {*own, "StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"}


def test_unknown_values_are_refused(tmp_path: Path) -> None:
    for wrong in ({"replica": 3}, {"replicas": 0}, {"extraPorts": [{"port": 1}]}):
        with pytest.raises(AssertionError, match="values don't meet the specifications"):
            rendered(tmp_path, wrong)


def judged(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Check a trivium.toml like `trivium config check`, with the files that it names."""
    authority = trustme.CA()
    certificate = authority.issue_cert("gateway.example")
    files = {"passwords/passwords": PASSWORD.encode()}
    files |= {"tls/tls.crt": certificate.cert_chain_pems[0].bytes(), "tls/tls.key": certificate.private_key_pem.bytes()}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    file = tmp_path / "trivium.toml"
    file.write_text(text.replace(SECRETS, str(tmp_path)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = load(file)
    check(config)
    return config


def pod(manifests: Manifests) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = manifests["StatefulSet", "trivium"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


@pytest.mark.parametrize("which", ["plain", "everything"])
def test_the_pods_fit_their_configuration(
    charts: tuple[Manifests, Manifests], which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = charts[which == "everything"]
    spec, container = pod(manifests)
    for variable in container.get("env", []):
        monkeypatch.setenv(variable["name"], "secret")
    config = judged(manifests["ConfigMap", "trivium"]["data"]["trivium.toml"], tmp_path, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listening = {"mqtt": config.mqtt, "amqp": config.amqp, "http": config.http, "management": config.management}
    addresses = {name: one.address for name, one in listening.items()}
    if config.mqtt.websocket_address is not None:
        addresses["mqtt-ws"] = config.mqtt.websocket_address
    assert ports == {name: address.port for name, address in addresses.items()}
    assert {address.host for address in addresses.values()} == {"0.0.0.0"}
    tls = config.security.tls_cert is not None
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("management", "HTTPS" if tls else "HTTP")
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    # SIGTERM drains, and a second signal would end the drain, so there is no preStop.
    assert spec["terminationGracePeriodSeconds"] > config.drain.limit_s + config.drain_timeout_s + 10
    assert "lifecycle" not in container
    assert config.drain.lead_s is not None
    readiness = container["readinessProbe"]
    assert config.drain.lead_s > 2 * readiness["periodSeconds"] * readiness["failureThreshold"]
    # Otherwise the Services' variables would be taken for misspelled keys, and the gateway would not start.
    assert spec["enableServiceLinks"] is False
    # Every mounted volume exists, and every file that is read is mounted.
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    volumes |= {
        claim["metadata"]["name"]: claim
        for claim in manifests["StatefulSet", "trivium"]["spec"]["volumeClaimTemplates"]
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert str(Path(container["args"][-1]).parent) in mounts
    for path in (config.security.password_file, config.security.tls_cert, config.security.tls_key):
        if path is not None:
            assert f"{SECRETS}/{path.relative_to(tmp_path).parent}" in mounts
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for one in (one for (found, _), one in manifests.items() if found == kind):
            chosen = one["spec"].get("selector", one["spec"].get("podSelector"))
            labels = manifests["StatefulSet", "trivium"]["spec"]["template"]["metadata"]["labels"]
            assert chosen.get("matchLabels", chosen) == labels
            named = {port["targetPort"] for port in one["spec"].get("ports", [])}
            assert named <= set(ports)


def test_the_image_matches_the_pods(base: Manifests) -> None:
    spec, container = pod(base)
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user = spec["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in dockerfile
    assert spec["securityContext"]["fsGroup"] == user
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"TRIVIUM_DATA_DIR={mounts['data']}\n" in dockerfile
    assert 'ENTRYPOINT ["trivium"]' in dockerfile
    assert "__ADDRESS=" not in dockerfile  # a variable would override the file
    assert container["args"][0] == "up"


def test_keda_queries_existing_metrics(charts: tuple[Manifests, Manifests]) -> None:
    scaled = charts[1]["ScaledObject", "trivium"]["spec"]
    for trigger in scaled["triggers"]:
        labels_of(promql.parse(trigger["metadata"]["query"]))
    assert scaled["scaleTargetRef"]["name"] == "trivium"
    assert "replicas" not in charts[1]["StatefulSet", "trivium"]["spec"]


def test_the_chart_has_the_alerts(charts: tuple[Manifests, Manifests]) -> None:
    rules = charts[1]["PrometheusRule", "trivium"]["spec"]
    urls = [rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"]]
    assert all(url.startswith("https://wiki.example/trivium/docs/operations.md#trivium") for url in urls)
    monitor = charts[1]["ServiceMonitor", "trivium"]["spec"]
    service = charts[1]["Service", "trivium-management"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "trivium"  # the job that the alerts query
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


# Strimzi


def test_the_files_for_strimzi_are_up_to_date() -> None:
    for path, text in strimzi.files():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make tables`"


async def test_strimzis_topics_match_those_that_the_gateway_creates(bootstrap: str) -> None:
    listed = {one.name: one for one in strimzi.own_topics(Config())}
    async with assembled(bootstrap, create=True, wait=False) as gateway:
        declared = dict(gateway.log.topics._internal)
    # The listeners create these with the first message.
    assert listed.keys() - declared.keys() == {"__trivium_refused"}
    assert declared == {name: listed[name] for name in declared}


# systemd


def unit() -> Iterator[tuple[str, str]]:
    """Yield the keys and values of the service, repeated ones too."""
    section = ""
    for line in (DEPLOY / "systemd" / "trivium.service").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section == "Service" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name, value


def test_systemd_understands_the_unit() -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        configparser.ConfigParser(strict=False, interpolation=None).read(DEPLOY / "systemd" / "trivium.service")
        return
    done = subprocess.run(
        [program, "verify", str(DEPLOY / "systemd" / "trivium.service")], capture_output=True, text=True, check=False
    )
    # Only the missing executable may be reported, since the gateway is not installed here.
    told = [line for line in done.stderr.splitlines() if "trivium.service" in line]
    assert [line for line in told if "/opt/trivium/bin/trivium is not executable" not in line] == []


def test_the_unit_lets_the_gateway_drain() -> None:
    service = dict(unit())
    config = Config()
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    assert float(service["TimeoutStopSec"]) > config.drain.limit_s + config.drain_timeout_s + 10
    assert service["ExecReload"].startswith("/bin/kill -HUP ")
    assert service["RestartPreventExitStatus"] == "2"
    variable, _, directory = service["Environment"].partition("=")
    assert (variable, directory) == ("TRIVIUM_DATA_DIR", f"/var/lib/{service['StateDirectory']}")


# Compose


def test_the_compose_file_fits_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    schema = yaml.safe_load((Path(__file__).with_name("compose_schema.yaml")).read_text(encoding="utf-8"))
    jsonschema_rs.validator_for(schema).validate(compose)
    volumes = set()
    for service in compose["services"].values():
        assert set(service.get("depends_on", [])) <= compose["services"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))  # these need no password
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
            else:
                volumes.add(source)
    assert volumes == compose["volumes"].keys()
    gateway = compose["services"]["gateway"]
    text = (DEPLOY / "compose" / "trivium.toml").read_text(encoding="utf-8")
    config = judged(text, tmp_path, monkeypatch)
    assert float(gateway["stop_grace_period"].removesuffix("s")) > config.drain.limit_s + config.drain_timeout_s + 10
    published = {int(port.rpartition(":")[2]) for port in gateway["ports"]}
    assert published == {one.address.port for one in (config.mqtt, config.amqp, config.http, config.management)}
    assert config.kafka.bootstrap_servers in compose["services"]["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    prometheus = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text(encoding="utf-8"))
    [job] = prometheus["scrape_configs"]
    assert job["job_name"] == "trivium"
    assert job["static_configs"] == [{"targets": [f"gateway:{config.management.address.port}"]}]


# Backup


def backup() -> Any:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("state_topics", DEPLOY / "backup" / "state_topics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_backup_restores_every_byte(bootstrap: str, new_topic: Callable[..., Awaitable[str]]) -> None:
    script = backup()
    settings = {"bootstrap_servers": bootstrap}
    names = await new_topic(partitions=2), await new_topic(partitions=2)
    written_ms = int(time.time() * 1000) - 5000  # Kafka's retention uses it
    headers = [("a", b"\xff\x00"), ("a", b""), ("b", None)]
    async with AIOKafkaProducer(**settings, acks="all") as producer:
        for key, value, partition in (
            (b"session/\xfe", b"old", 0),
            (b"gone", b"was here", 1),
            (b"other", b"\x00\x01", 1),
            (b"session/\xfe", b"new", 0),
            (b"gone", None, 1),
            (b"gateway/abc", b"of a process", 0),
        ):
            await producer.send_and_wait(
                names[0], value, key, partition=partition, timestamp_ms=written_ms, headers=headers
            )
    saved = await script.save(settings, names[0])
    assert len(saved) == 2
    with pytest.raises(SystemExit, match="is not empty"):
        await script.restore(settings, saved)
    elsewhere = [json.dumps([names[1], *json.loads(line)[1:]]) for line in saved]
    await script.restore(settings, elsewhere)
    assert sorted(await script.save(settings, names[1])) == sorted(elsewhere)
    consumer = AIOKafkaConsumer(**settings, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign([TopicPartition(names[1], 0)])
    record = await consumer.getone()
    await consumer.stop()
    assert (record.key, record.value, record.timestamp) == (b"session/\xfe", b"new", written_ms)
    assert list(record.headers) == headers
    [wide] = [json.dumps([names[1] + "-nowhere", *json.loads(line)[1:]]) for line in saved[:1]]
    with pytest.raises(SystemExit, match="does not exist"):
        await script.restore(settings, [wide])


def test_everything_is_listed() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in DEPLOY.iterdir() if path.is_dir() and f"]({path.name}" not in page] == []
    assert dashboards.DEPLOY == DEPLOY
