"""Submits a job to a standalone cluster, Kubernetes or YARN: the `spark-submit` command, and the archive it sends.

The archive has the modules of this project that a job needs, for `--py-files`. Third-party packages (msgspec, pydantic,
prometheus-client, rich, structlog and those that decoders need) must be installed where the driver runs: on this
machine in client mode, otherwise in the cluster's image.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from spark_sinks.spark.process import children

CLIENT: Final = "client"
CLUSTER: Final = "cluster"
PACKAGES: Final = ("spark_sinks", "telemetry", "mapping", "kafka_records")
ROOT: Final = Path(__file__).parents[2]
MAIN: Final = "import sys\n\nfrom spark_sinks.run.runner import main\n\nsys.exit(main(sys.argv[1:]))\n"
IMAGE: Final = "spark.kubernetes.container.image"
UPLOADS: Final = "spark.kubernetes.file.upload.path"
SUBMITTED: Final = "--submitted"


class SubmitError(ValueError):
    """The job cannot be submitted with these options; the message says why."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a submission."""

    job: str  # its name, or its file
    title: str  # its name on the cluster's pages
    file: Path | None  # its job file
    checkpoint: str
    arguments: Sequence[str]  # the job's, after its name
    master: str
    deploy_mode: str  # where the driver runs: CLIENT (this machine) or CLUSTER
    driver_memory: str  # such as `1g`
    conf: Mapping[str, str]  # Spark's settings

    def check(self) -> None:
        """Raise SubmitError if the cluster cannot run the job with these options."""
        kind = self.master.partition(":")[0]
        if kind not in {"spark", "k8s", "yarn"}:
            raise SubmitError(
                f"--master {self.master}: a cluster is spark://HOST:PORT, k8s://https://HOST:PORT or yarn; "
                "for this machine there is `trivium spark run`"
            )
        if self.deploy_mode not in {CLIENT, CLUSTER}:
            raise SubmitError(f"--deploy-mode {self.deploy_mode}: must be client or cluster")
        if self.deploy_mode == CLIENT:
            return
        if kind == "spark":
            raise SubmitError("--deploy-mode cluster: a standalone cluster supports Python drivers in client mode only")
        if "://" not in self.checkpoint:
            raise SubmitError(
                f"the checkpoint {self.checkpoint} is a local directory, but the driver runs on the cluster: "
                "use a URL that all its machines reach (hdfs://, s3a://)"
            )
        if kind == "k8s":
            for name, what in ((IMAGE, "the driver's image (deploy/spark)"), (UPLOADS, "where files are uploaded")):
                if name not in self.conf:
                    raise SubmitError(f"--conf {name}=... is required: {what}")

    def command(self, archive: Path, main: Path, jars: Sequence[Path]) -> list[str]:
        """Return the `spark-submit` arguments; `jars` are the Kafka connector's."""
        conf = {"spark.log.level": "WARN", **self.conf}
        job, files = self.job, []
        if self.file is not None:
            job = str(self.file.resolve())
            if self.deploy_mode == CLUSTER:
                files, job = ["--files", job], self.file.name
        return [
            *("--master", self.master, "--deploy-mode", self.deploy_mode, "--name", f"trivium {self.title}"),
            *("--driver-memory", self.driver_memory),
            *("--py-files", str(archive)),
            *("--jars", ",".join(map(str, jars))),
            *files,
            *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}")),
            *(str(main), job, SUBMITTED, *self.arguments),
        ]


def modules() -> dict[str, Path]:
    """Return the modules (and packages) of this project that a job imports, by their path in the archive."""
    modules_found: dict[str, Path] = {}
    waiting = sorted((ROOT / "spark_sinks").rglob("*.py"))
    while waiting:
        path = waiting.pop()
        place = path.relative_to(ROOT).as_posix()
        if place in modules_found:
            continue
        modules_found[place] = path
        near = [ROOT / above / "__init__.py" for above in path.relative_to(ROOT).parents[:-1]]
        for name in _imported(path):
            module = ROOT.joinpath(*name.split("."))
            near += [module.with_suffix(".py"), module / "__init__.py"]
        waiting += [one for one in near if one.is_file()]
    return dict(sorted(modules_found.items()))


def _imported(path: Path) -> Iterator[str]:
    """Yield the names in this project that a module imports; some may be attributes instead of modules."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def archive(directory: Path) -> tuple[Path, Path]:
    """Write the archive and the start program unless they exist; the archive is named by its content."""
    contents = {name: path.read_bytes() for name, path in modules().items()}
    mark = hashlib.sha256(b"".join(name.encode() + b"\0" + text for name, text in contents.items())).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    made, main = directory / f"trivium-{mark}.zip", directory / "trivium_job.py"
    if not made.exists():
        new = directory / f".{mark}.{os.getpid()}.new"
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as file:
            for name, text in contents.items():
                file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
        new.replace(made)
    if not main.exists() or main.read_text(encoding="utf-8") != MAIN:
        new = directory / f".main.{os.getpid()}.new"
        new.write_text(MAIN, encoding="utf-8")
        new.replace(main)
    return made, main


def spark_home() -> Path:
    """Return the Spark directory inside pyspark; SubmitError if it is not installed."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SubmitError("pyspark is not installed: pip install 'trivium[spark]'")
    return Path(spec.origin).parent


def environment(java_home: Path, deploy_mode: str) -> dict[str, str]:
    """Return the environment in which `spark-submit` finds Java and Python; `PYSPARK_PYTHON` names the cluster's."""
    made = {**os.environ, "SPARK_HOME": str(spark_home()), "JAVA_HOME": str(java_home)}
    if deploy_mode == CLIENT:
        made["PYSPARK_DRIVER_PYTHON"] = sys.executable
        made.setdefault("PYSPARK_PYTHON", sys.executable)
    return made


def run(command: Sequence[str], environment: Mapping[str, str], deploy_mode: str) -> int:
    """Run the command and return its exit code. In client mode SIGTERM and Ctrl-C end the job cleanly."""
    if deploy_mode == CLUSTER:
        return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - the job runs there
    process = subprocess.Popen(command, env=environment, start_new_session=True)  # noqa: S603

    def forward(_signal: int, _frame: FrameType | None) -> None:
        # The driver stops the job cleanly, and its JVM ends with it. A signal to the JVM would leave the driver
        # running.
        for child in children(process.pid) or [process.pid]:  # the Python driver, once it runs
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    return process.wait()
