"""`trivium spark submit`: its command line and archive. No cluster is needed."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.process.cli import app
from spark_sinks.run import runner
from spark_sinks.spark import submit

ROOT = Path(__file__).parents[2]
STATS = ROOT / "examples" / "spark" / "window_stats.toml"
K8S = ("--master", "k8s://https://kube:6443")


def dry_run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["spark", "submit", *arguments, "--dry-run"])
    return result.exit_code, (result.output if result.exit_code else result.stdout).strip()


def options(command: list[str]) -> dict[str, str]:
    """Return Spark's options, with those after --conf by their names."""
    main = next(at for at, part in enumerate(command) if part.endswith("trivium_job.py"))
    pairs = list(zip(command[1:main:2], command[2:main:2], strict=True))
    conf = dict(value.split("=", 1) for name, value in pairs if name == "--conf")
    return {**{name: value for name, value in pairs if name != "--conf"}, **conf}


def test_a_job_on_a_standalone_cluster_has_its_driver_here() -> None:
    code, text = dry_run(
        str(STATS), "--master", "spark://127.0.0.1:7077", "--bootstrap-servers", "kafka:9092",
        "--conf", "spark.executor.memory=600m",
    )  # fmt: skip
    assert code == 0, text
    command = shlex.split(text)
    assert Path(command[0]).name == "spark-submit"
    told = options(command)
    assert (told["--master"], told["--deploy-mode"]) == ("spark://127.0.0.1:7077", "client")
    assert (told["spark.executor.memory"], told["spark.log.level"]) == ("600m", "WARN")
    assert all(Path(jar).is_file() for jar in told["--jars"].split(","))
    job, *rest = command[command.index(next(part for part in command if part.endswith("trivium_job.py"))) + 1 :]
    assert job == str(STATS)
    given, kind, asked = runner.asked([job, *rest])
    assert (given.submitted, kind.file, asked.bootstrap_servers) == (True, STATS, "kafka:9092")


def test_on_kubernetes_the_driver_runs_there_and_gets_the_job_file() -> None:
    code, text = dry_run(
        str(STATS), *K8S, "--checkpoint", "s3a://lake/checkpoints/stats",
        "--conf", "spark.kubernetes.container.image=trivium-spark:0.1.0",
        "--conf", "spark.kubernetes.file.upload.path=s3a://lake/uploads",
    )  # fmt: skip
    assert code == 0, text
    command = shlex.split(text)
    told = options(command)
    assert (told["--deploy-mode"], told["--files"]) == ("cluster", str(STATS))
    assert told["spark.kubernetes.container.image"] == "trivium-spark:0.1.0"
    assert command[command.index(next(part for part in command if part.endswith("trivium_job.py"))) + 1] == STATS.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((str(STATS),), "a cluster is spark://HOST:PORT, k8s://https://HOST:PORT or yarn"),
        ((str(STATS), "--master", "local[2]"), "for this machine there is `trivium spark run`"),
        (("max-temperature", "--master", "yarn"), "are required: --bootstrap-servers, --checkpoint"),
        ((str(STATS), "--master", "yarn", "--trigger", "now"), "invalid choice: 'now'"),
        ((str(STATS), "--master", "spark://h:7077", "--deploy-mode", "cluster"), "in client mode only"),
        ((str(STATS), *K8S), "is a local directory, but the driver runs on the cluster"),
        ((str(STATS), *K8S, "--checkpoint", "s3a://a/b"), "spark.kubernetes.container.image=... is required"),
        ((str(STATS), "--master", "yarn", "--deploy-mode", "cloud"), "client or cluster"),
        (
            (str(STATS.with_name("dlq_replay.toml")), "--master", "yarn"),
            "needs no Spark; start it by `trivium spark run`",
        ),
        (("wrong.toml", "--master", "yarn"), "wrong.toml: No such file or directory"),
    ],
)
def test_a_job_that_a_cluster_cannot_run_is_refused_before_submission(
    arguments: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = dry_run(*arguments)
    assert code == 2
    assert said in " ".join((text + capfd.readouterr().err).split())


def test_the_archive_has_all_that_a_job_needs(tmp_path: Path) -> None:
    archive, main = submit.archive(tmp_path / "sent")
    again, _ = submit.archive(tmp_path / "again")
    assert archive.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(archive) as file:
        names = set(file.namelist())
    assert {"spark_sinks/run/runner.py", "mapping/record.py", "telemetry/statistics.py"} <= names
    assert not [name for name in names if name.startswith("gateway/") or not name.endswith(".py")]
    # Without the site module, the project is not on the path, because it is installed in editable mode.
    code = f"import sys; sys.path[:0] = [{str(archive)!r}, {sysconfig.get_path('purelib')!r}]\n{main.read_text()}"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code, "max-temperature", "--help"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "--dead-letter" in ran.stdout, ran.stderr
