"""deploy/spark: the manifests are consistent, and they start a job that `check` accepts."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.embedded.jars import locked_jars
from spark_sinks.run import runner
from spark_sinks.run.job_file import read
from spark_sinks.spark import submit

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "spark"
LOCKED = [
    f"{jar.group}:{jar.artifact}:{jar.version}"
    for name in ("spark-sql-kafka-0-10_2.13", "spark-avro_2.13")
    for jar in locked_jars("spark")
    if jar.artifact == name
]
"""What a job needs and Spark's distribution lacks, in the versions that the product runs with."""


def manifests(name: str) -> dict[str, Any]:
    """Return a file's manifests by kind."""
    found = list(yaml.safe_load_all((HERE / name).read_text(encoding="utf-8")))
    assert all({"apiVersion", "kind", "metadata"} <= one.keys() for one in found)
    return {one["kind"]: one for one in found}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write the job file as it is mounted."""
    [(name, text)] = manifests("common.yaml")["ConfigMap"]["data"].items()
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def check(job: Path, arguments: list[str]) -> None:
    file, *options = arguments
    assert file == f"/etc/trivium/{job.name}"
    spec = read(job).spec
    assert (spec.title, spec.run.checkpoint) == ("hall", "/checkpoints/hall")
    given, _, _ = runner.asked([str(job), *options])
    assert (given.submitted, given.metrics.host, given.metrics.port) == (True, "0.0.0.0", 9101)


def mounts(volumes: list[dict[str, Any]], mounted: list[dict[str, Any]]) -> dict[str, str]:
    """Return where the claim and the job file are mounted, by their names in common.yaml."""
    names = {
        one["name"]: one.get("configMap", {}).get("name") or one["persistentVolumeClaim"]["claimName"]
        for one in volumes
    }
    return {names[one["name"]]: one["mountPath"] for one in mounted}


EVERYTHING = {"trivium-hall": "/etc/trivium", "trivium-checkpoints": "/checkpoints"}


def test_common_names_are_used_everywhere() -> None:
    common = manifests("common.yaml")
    assert common["PersistentVolumeClaim"]["metadata"]["name"] == "trivium-checkpoints"
    assert common["ConfigMap"]["metadata"]["name"] == "trivium-hall"
    account = common["ServiceAccount"]["metadata"]["name"]
    assert common["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert common["RoleBinding"]["roleRef"]["name"] == common["Role"]["metadata"]["name"]


def test_the_operators_job(job: Path) -> None:
    application = manifests("sparkapplication.yaml")["SparkApplication"]
    spec = application["spec"]
    assert application["apiVersion"] == "sparkoperator.k8s.io/v1beta2"
    assert (spec["type"], spec["mode"], spec["sparkVersion"]) == ("Python", "cluster", version("pyspark"))
    assert spec["deps"]["packages"] == LOCKED
    assert spec["mainApplicationFile"] == "local:///opt/trivium/trivium_job.py"
    assert mounts(spec["volumes"], spec["driver"]["volumeMounts"]) == EVERYTHING
    assert mounts(spec["volumes"], spec["executor"]["volumeMounts"]) == {"trivium-checkpoints": "/checkpoints"}
    check(job, spec["arguments"])


def test_the_plain_spark_submit(job: Path) -> None:
    found = manifests("spark-submit.yaml")
    pod = found["Deployment"]["spec"]["template"]
    [driver] = pod["spec"]["containers"]
    main = driver["args"].index("/opt/trivium/trivium_job.py")
    told = [argument.removeprefix("--").partition("=") for argument in driver["args"][:main]]
    conf = dict(value.split("=", 1) for name, _, value in told if name == "conf")
    options = {name: value for name, _, value in told if name != "conf"}
    assert (options["deploy-mode"], options["packages"].split(",")) == ("client", LOCKED)
    ports = {str(port["port"]) for port in found["Service"]["spec"]["ports"]}
    assert {conf["spark.driver.port"], conf["spark.driver.blockManager.port"], "9101"} == ports
    assert conf["spark.driver.host"] == found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert conf["spark.kubernetes.container.image"] == driver["image"]
    assert mounts(pod["spec"]["volumes"], driver["volumeMounts"]) == EVERYTHING
    check(job, driver["args"][main + 1 :])


def test_the_program_is_that_of_submit() -> None:
    assert (HERE / "trivium_job.py").read_text(encoding="utf-8").endswith(submit.MAIN)


def test_the_images_python_is_built_for_its_own_libraries() -> None:
    text = (HERE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert {line[1] for line in lines if line[0] == "FROM"} == {"${SPARK}"}, "one C library"
    [image] = [line[1] for line in lines if line[0] == "ARG"]
    assert image == f"SPARK=apache/spark:{version('pyspark')}-java17"
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for line in lines:
        if line[0] == "COPY" and not line[1].startswith("--from"):
            for source in line[1:-1]:
                assert (ROOT / source).exists()
                assert any((ROOT / source).match(f"{ROOT}/{kept[1:]}") for kept in ignored if kept[0] == "!"), source
    assert "'.[spark,lake]'" in text
