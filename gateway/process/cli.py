"""The `trivium` command."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.process.commands import operating, passwords
from gateway.process.commands.common import FAILED, NOT_STARTED, ConfigFile, fail, read_config, without_secrets
from gateway.runtime.version import LibraryError, check_libraries, version

if TYPE_CHECKING:
    from gateway.embedded.java import Java

app = typer.Typer(
    help="MQTT 5, AMQP 1.0 and HTTP into Apache Kafka and back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)
spark_app = typer.Typer(help="Spark jobs on the topics.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(spark_app, name="spark")
operating.add_to(app)
passwords.add_to(app)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trivium {version()}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """MQTT 5, AMQP 1.0 and HTTP into Apache Kafka and back."""


Listen = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0: any free port.")]


@app.command()
def up(
    config: ConfigFile = None,
    mqtt: Listen = None,
    mqtt_websocket: Listen = None,
    amqp: Listen = None,
    amqp_websocket: Listen = None,
    http: Listen = None,
    management: Listen = None,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,...", help="Kafka's brokers; without them an embedded broker is started."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory for the embedded broker's data.")] = None,
    kafka_port: Annotated[int | None, typer.Option(help="The embedded broker's port; 0: any free port.")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File to write once every listener accepts (JSON: addresses, process ids).")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond loopback without authentication.")
    ] = None,
) -> None:
    """Run the gateway until Ctrl-C, or SIGTERM, which first disconnects the clients gradually (see `trivium drain`)."""
    from gateway.observe.collector import set_gc_thresholds  # noqa: PLC0415 - other commands use Python's own thresholds

    set_gc_thresholds()
    flags: dict[str, Any] = {
        "data_dir": data_dir,
        "mqtt": {"address": mqtt, "websocket_address": mqtt_websocket},
        "amqp": {"address": amqp, "websocket_address": amqp_websocket},
        "http": {"address": http},
        "management": {"address": management},
        "kafka": {"bootstrap_servers": bootstrap_servers},
        "embedded": {"port": kafka_port},
        "security": {"insecure": insecure},
    }
    settings = read_config(config, flags)
    try:
        check_libraries()
    except LibraryError as error:
        raise fail(str(error), NOT_STARTED) from error
    from gateway.process.app import FatalError, StartError, run  # noqa: PLC0415 - `config check` needs neither Kafka nor proton

    try:
        run(settings, ready_file)
    except (StartError, FatalError) as error:
        code = FAILED if isinstance(error, FatalError) else NOT_STARTED
        raise fail(without_secrets(str(error), settings), code) from error


@app.command("doctor")
def doctor(
    config: ConfigFile = None,
    bootstrap_servers: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="Kafka (default: that of the configuration).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each finding.")] = False,
) -> None:
    """Check whether Kafka and this machine meet the gateway's requirements; exit code 1 if not."""
    settings = read_config(config, {"kafka": {"bootstrap_servers": bootstrap_servers}})
    from gateway.kafka.cluster.doctor import Finding, examine  # noqa: PLC0415 - aiokafka loads slowly
    from gateway.observe.logs import configure_logs  # noqa: PLC0415
    from gateway.runtime.secret import secrets_in  # noqa: PLC0415

    configure_logs(settings.log, secrets=secrets_in(settings))

    def say(finding: Finding) -> None:
        typer.echo(without_secrets(json.dumps(finding._asdict()) if as_json else str(finding), settings))

    if not asyncio.run(examine(settings, say)):
        raise typer.Exit(FAILED)


@config_app.command("check")
def config_check(
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: whether it is valid, and its errors.")] = False,
) -> None:
    """Check the configuration and print its errors."""
    from gateway.process.app import StartError, check  # noqa: PLC0415
    from gateway.settings.config import ConfigError, load  # noqa: PLC0415

    errors = ""
    try:
        settings = load(config)
        check(settings)
    except ConfigError as error:
        errors = str(error)
    except StartError as error:
        errors = without_secrets(str(error), settings)
    if as_json:
        typer.echo(json.dumps({"valid": not errors, "errors": errors.splitlines()}))
        if errors:
            raise typer.Exit(NOT_STARTED)
    elif errors:
        raise fail(errors)
    else:
        typer.echo("The configuration is valid.")


@config_app.command("show")
def config_show(config: ConfigFile = None) -> None:
    """Print the effective configuration as JSON; secrets are blanked."""
    typer.echo(json.dumps(read_config(config).model_dump(mode="json"), indent=2))


@spark_app.command("list")
def spark_list() -> None:
    """List the kinds of jobs: those declared in a job file, and those started by name."""
    from spark_sinks.spec.jobs import KINDS, NAMED  # noqa: PLC0415

    typer.echo("In a job file (docs/spark.md):")
    for name, kind in KINDS.items():
        typer.echo(f"  {name:16}{kind.SUMMARY}")
    typer.echo("By name, with options (trivium spark run NAME -- --help):")
    for name, summary in NAMED.items():
        typer.echo(f"  {name:16}{summary}")


@spark_app.command("check")
def spark_check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Job files, .toml or .py.")],
) -> None:
    """Check job files and print their errors; neither Kafka nor Java is needed. Kafka tells whose clocks count."""
    from spark_sinks.run import clocks  # noqa: PLC0415
    from spark_sinks.run.job_file import JobFileError, read  # noqa: PLC0415
    from spark_sinks.spec.jobs import JobSpec  # noqa: PLC0415

    wrong = []
    for file in files:
        try:
            spec = read(file).spec
        except JobFileError as error:
            wrong.append(str(error))
        else:
            typer.echo(f"{file}: valid: {spec.SUMMARY}")
            if isinstance(spec, JobSpec) and (note := clocks.note(spec)) is not None:
                typer.echo(f"{file}: note: {note}")
    if wrong:
        raise fail("\n".join(wrong))


@spark_app.command("run", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def spark_run(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="A job file (.toml, .py), or a job's name, such as max-temperature.")],
    bootstrap_servers: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="Kafka (default: the job file's, else 127.0.0.1:9092).")
    ] = None,
) -> None:
    """Run a Spark job with the pinned jars; further options go to the job (see `-- --help`)."""
    from spark_sinks.run.job_file import JobFileError, is_job_file, read  # noqa: PLC0415

    needs_spark = True
    if is_job_file(job):
        try:
            needs_spark = read(Path(job)).spec.SPARK
        except JobFileError as error:
            raise fail(str(error)) from error
    elif bootstrap_servers is None:
        bootstrap_servers = "127.0.0.1:9092"
    argv = [sys.executable, "-m", "spark_sinks", job]
    argv += [] if bootstrap_servers is None else ["--bootstrap-servers", bootstrap_servers]
    if needs_spark:
        from gateway.embedded.class_archive import archive_options, archive_path  # noqa: PLC0415
        from gateway.embedded.jars import cache_directory  # noqa: PLC0415

        java, jars = _java_and_jars()
        os.environ["JAVA_HOME"] = str(java.path.resolve().parent.parent)
        archive = shlex.join(archive_options(archive_path("spark", java, jars, cache_directory())))
        argv += ["--jars", ",".join(str(jar) for jar in jars), f"--driver-java-options={archive}"]
    os.execv(sys.executable, [*argv, *context.args])  # noqa: S606 - the job gets our process id, signals and terminal


@spark_app.command("maintain")
def spark_maintain(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Job files of archives.")],
) -> None:
    """Merge an archive's small files, delete expired files and leftovers of crashed jobs; its job may be running."""
    from spark_sinks.archive.contract import ArchiveError  # noqa: PLC0415
    from spark_sinks.archive.upkeep import described, maintain  # noqa: PLC0415
    from spark_sinks.run.job_file import JobFileError, read  # noqa: PLC0415
    from spark_sinks.spec.jobs import Archive  # noqa: PLC0415

    for file in files:
        try:
            spec = read(file).spec
            if not isinstance(spec, Archive):
                raise fail(f"{file}: job: only archives can be maintained, not {spec.job}")
            done = maintain(spec)
        except (JobFileError, ArchiveError) as error:
            raise fail(str(error)) from error
        typer.echo(f"{spec.sink.archive}: {described(done)}")


def _java_and_jars() -> tuple[Java, list[Path]]:
    """Return Java and the jars for a Spark job; missing jars are downloaded."""
    from gateway.embedded.jars import console_report, ensure_jars  # noqa: PLC0415
    from gateway.embedded.java import SetupError, find_java  # noqa: PLC0415

    try:
        java = find_java()
        with console_report() as report:
            return java, ensure_jars("spark", report=report)
    except SetupError as error:
        raise fail(str(error)) from error


@spark_app.command("submit", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def spark_submit(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="A job file (.toml, .py), or a job's name, such as max-temperature.")],
    master: Annotated[
        str | None, typer.Option(help="spark://HOST:PORT, k8s://https://HOST:PORT or yarn (default: the job file's).")
    ] = None,
    deploy_mode: Annotated[
        str | None,
        typer.Option(metavar="client|cluster", help="Where the driver runs (default: client; with k8s:// cluster)."),
    ] = None,
    bootstrap_servers: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="Kafka, as the cluster reaches it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the spark-submit and do not run it.")] = False,
) -> None:
    """Run a Spark job on a cluster; further options go to the job (see `trivium spark run JOB -- --help`)."""
    from gateway.embedded.jars import cache_directory  # noqa: PLC0415
    from spark_sinks.spark import submit  # noqa: PLC0415

    try:
        home = submit.spark_home()
        from spark_sinks.run import runner  # noqa: PLC0415 - needs pyspark
        from spark_sinks.run.job import DRIVER_MB  # noqa: PLC0415
        from spark_sinks.spark.session import AVRO_LIMITS, driver_java  # noqa: PLC0415

        kafka = [] if bootstrap_servers is None else ["--bootstrap-servers", bootstrap_servers]
        arguments = [*kafka, *context.args]
        given, kind, options = runner.asked([job, *arguments])
        cluster = master or given.master or ""
        mode = deploy_mode or (submit.CLUSTER if cluster.startswith("k8s") else submit.CLIENT)
        plan = submit.Submission(
            job=job,
            title=kind.name,
            file=kind.file,
            checkpoint=options.checkpoint,
            arguments=arguments,
            master=cluster,
            deploy_mode=mode,
            driver_memory=given.driver_memory or f"{DRIVER_MB}m",
            conf={**dict(given.conf), **driver_java(dict(given.conf), AVRO_LIMITS)},
        )
        plan.check()
    except ValueError as error:
        raise fail(str(error)) from error
    java, jars = _java_and_jars()
    archive, main = submit.archive(cache_directory() / "spark-submit")
    command = [str(home / "bin" / "spark-submit"), *plan.command(archive, main, jars)]
    if dry_run:
        typer.echo(shlex.join(command))
        return
    environment = submit.environment(java.path.resolve().parent.parent, mode)
    raise typer.Exit(submit.run(command, environment, mode))


@spark_app.command("status")
def spark_status(
    job: Annotated[
        str | None, typer.Argument(help="A job file or a job's name (default: all of this machine).")
    ] = None,
    at: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="Also the job with metrics at this address.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show the Spark jobs that you started on this machine; exit code 1 if a named job does not run or answer."""
    from spark_sinks.run import runs, status  # noqa: PLC0415
    from spark_sinks.spec.values import Listen  # noqa: PLC0415

    try:
        addresses = [Listen.parse(address) for address in at or ()]
    except ValueError as error:
        raise fail(f"--at: {error}") from error
    known = runs.find(job) if job is not None else [] if addresses else runs.known()
    if job is not None and not known:
        raise fail(runs.not_running(job, known), FAILED)
    jobs = status.status_of(known, addresses)
    if as_json:
        typer.echo(status.as_json(jobs))
    elif not jobs:
        typer.echo("No Spark job has been started on this machine by this user.")
    else:
        status.show(jobs)
    if (job is not None or addresses) and not all(one.good for one in jobs):
        raise typer.Exit(FAILED)


@spark_app.command("stop")
def spark_stop(
    job: Annotated[str, typer.Argument(help="A job file, or a job's name.")],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has stopped.")] = 60.0,
) -> None:
    """Stop a Spark job on this machine like Ctrl-C, and wait; exit code 1 if it does not run or does not stop."""
    from spark_sinks.run import runs  # noqa: PLC0415

    try:
        ended = runs.stop(job, timeout)
    except (runs.RunsError, TimeoutError) as error:
        raise fail(str(error), FAILED) from error
    if ended.error is not None:
        raise fail(f"{ended.job} failed while stopping: {ended.error}", FAILED)
    typer.echo(
        f"{ended.job} has stopped." if ended.ended is not None else f"{ended.job} has ended without a final status."
    )


def main() -> None:
    """Run the console script."""
    app()
