"""Fetch jars with the real Ivy from a local repository: complete, interrupted, wrong, concurrently, without network."""

from __future__ import annotations

import collections
import contextlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.embedded import ivy, jars
from gateway.embedded.jars import Jar, JarError, ensure_jars
from tools.fetch_jars import SETS, main
from tools.lock_jars import TESTS_LOCK, TESTS_WISHES

ROOT = Path(__file__).parents[3]
TOTAL = len(jars.locked_jars("spark"))


class Repository:
    """Serves the jars of the set `spark` over HTTP in Maven's layout; answers can be corrupted or held back."""

    def __init__(self, sources: dict[str, Path]) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self.spoilt: set[str] = set()
        self.status: dict[str, int] = {}
        self.held: dict[str, threading.Event] = {}
        self.reached = threading.Event()
        repository = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                name = self.path.rpartition("/")[2]
                status = repository.status.get(name, 200 if name in sources else 404)
                body = sources[name].read_bytes() if status == 200 else b""
                if name in repository.spoilt:
                    body = b"PK not the jar"
                if with_body and status == 200:
                    repository.requests[name] += 1
                    if name in repository.held:
                        repository.reached.set()
                        repository.held[name].wait(30)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    if with_body:
                        self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def settings(self, directory: Path) -> Path:
        path = directory / "settings.xml"
        root = f"http://127.0.0.1:{self.server.server_port}/repository"
        path.write_text(
            '<ivysettings><settings defaultResolver="ours"/><resolvers>'
            f'<ibiblio name="ours" m2compatible="true" usepoms="false" root="{root}"/></resolvers></ivysettings>'
        )
        return path


@pytest.fixture(scope="module")
def sources() -> dict[str, Path]:
    return {path.name: path for path in ensure_jars("spark")}


@pytest.fixture
def repository(sources: dict[str, Path]) -> Iterator[Repository]:
    served = Repository(sources)
    thread = threading.Thread(target=served.server.serve_forever)
    thread.start()
    yield served
    for event in served.held.values():
        event.set()
    served.server.shutdown()
    thread.join()
    served.server.server_close()


@pytest.fixture
def environment(repository: Repository, tmp_path: Path) -> dict[str, str]:
    cache = tmp_path / "cache"
    return {
        **os.environ,
        "TRIVIUM_CACHE": str(cache),
        "TRIVIUM_IVY_SETTINGS": str(repository.settings(tmp_path)),
    }


def fetch(environment: dict[str, str]) -> list[Path]:
    return ensure_jars("spark", environment=environment)


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.fetch_jars", "spark"]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_all_are_fetched_once_verified_and_kept(environment, repository, tmp_path):
    steps = []
    paths = ensure_jars("spark", environment=environment, report=steps.append)
    assert [path.name for path in paths] == [jar.file_name for jar in jars.locked_jars("spark")]
    assert [jars.sha256_of(path) for path in paths] == [jar.sha256 for jar in jars.locked_jars("spark")]
    assert (steps[-1].done, steps[-1].total) == (TOTAL, TOTAL)
    assert set(repository.requests.values()) == {1}
    assert sorted(path.name for path in (tmp_path / "cache" / "jars").iterdir()) == sorted(
        [".lock", "verified.json", *(path.name for path in paths)]
    )

    repository.requests.clear()
    # No Java, no network and no report: there is nothing to do.
    assert (
        ensure_jars("spark", environment={**environment, "PATH": "", "JAVA_HOME": "/no"}, report=pytest.fail) == paths
    )

    paths[0].write_bytes(b"damaged")
    assert fetch(environment) == paths
    assert jars.sha256_of(paths[0]) == jars.locked_jars("spark")[0].sha256
    assert repository.requests == {paths[0].name: 1}

    (tmp_path / "cache" / "jars" / "verified.json").write_text("{broken")
    assert fetch(environment) == paths
    assert repository.requests == {paths[0].name: 1}  # they were hashed, not fetched


def test_interrupted_fetch_goes_on_where_it_was(environment, repository):
    last = max(jars.locked_jars("spark"), key=lambda jar: jars.locked_jars("spark").index(jar)).file_name
    repository.held[last] = threading.Event()
    first = start(environment)
    assert repository.reached.wait(30)
    first.kill()
    first.communicate()
    repository.held.pop(last).set()
    fetch(environment)
    assert repository.requests == {
        jar.file_name: 2 if jar.file_name == last else 1 for jar in jars.locked_jars("spark")
    }


def test_two_at_once_fetch_once(environment, repository):
    name = jars.locked_jars("spark")[0].file_name
    repository.held[name] = threading.Event()
    first = start(environment)
    assert repository.reached.wait(30)
    second = start(environment)
    assert second.stderr is not None
    assert "another process is fetching" in second.stderr.readline()
    repository.held[name].set()
    first.communicate()
    second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert set(repository.requests.values()) == {1}


def test_wrong_jar_is_refused_and_the_others_kept(environment, repository, tmp_path):
    wrong = jars.locked_jars("spark")[1].file_name
    repository.spoilt.add(wrong)
    with pytest.raises(JarError, match=rf"{wrong} is not the one in the lock \(SHA-256 \w+, expected \w+\)"):
        fetch(environment)
    assert not (tmp_path / "cache" / "jars" / wrong).exists()
    repository.spoilt.clear()
    fetch(environment)
    assert repository.requests == {
        jar.file_name: 2 if jar.file_name == wrong else 1 for jar in jars.locked_jars("spark")
    }


def test_missing_jar_is_named(environment, repository):
    missing = jars.locked_jars("spark")[1]
    repository.status[missing.file_name] = 404
    with pytest.raises(JarError, match=f"cannot fetch the spark jars: .*{missing.artifact}"):
        fetch(environment)


def test_no_network_is_tried_again_and_said(environment, repository, monkeypatch):
    monkeypatch.setattr(jars, "PAUSES_S", (0.0, 0.0))
    settings = Path(environment["TRIVIUM_IVY_SETTINGS"])
    settings.write_text(settings.read_text().replace(f":{repository.server.server_port}/", ":9/"))
    steps = []
    with pytest.raises(JarError, match=r"the network or the repository does not answer: .*TRIVIUM_IVY_SETTINGS"):
        ensure_jars("spark", environment=environment, report=steps.append)
    assert sum(step.text.startswith("trying again") for step in steps) == jars.ATTEMPTS - 1


def test_command_line_says_one_line(environment):
    environment["TRIVIUM_IVY_SETTINGS"] = "/no/such/file"
    process = start(environment)
    _, text = process.communicate()
    assert (process.returncode, text) == (1, "TRIVIUM_IVY_SETTINGS names /no/such/file, which is not a file\n")
    assert main(["beam"]) == 2


def test_unwritable_cache_is_named(environment, tmp_path):
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(JarError, match=r"cannot write the jars to .*cache/jars \(TRIVIUM_CACHE"):
        fetch(environment)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["java.io.IOException: No space left on device"], ivy.DiskFullError),
        (["module not found: a#b;1", "Server returned HTTP response code: 503"], ivy.NetworkError),
        (["Host repository.example not found."], ivy.NetworkError),
        (["module not found: a#b;1", "a#b;1: not found"], ivy.IvyError),
        ([], ivy.IvyError),
    ],
)
def test_failures_are_told_apart(lines, kind):
    assert type(ivy._failure(lines, 1)) is kind


def test_cache_directory(tmp_path):
    assert jars.cache_directory({"TRIVIUM_CACHE": str(tmp_path)}) == tmp_path
    assert jars.cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "trivium"
    default = Path.home() / ".cache" / "trivium"
    assert jars.cache_directory({}) == jars.cache_directory({"XDG_CACHE_HOME": "relative"}) == default


def test_locks_name_every_jar_once():
    for name, lock in [*((name, None) for name in SETS), *((name, TESTS_LOCK) for name in TESTS_WISHES)]:
        locked = jars.locked_jars(name, lock)
        assert all(isinstance(jar, Jar) and len(bytes.fromhex(jar.sha256)) == 32 for jar in locked)
        assert len({jar.file_name for jar in locked}) == len(locked)
    assert jars.locked_version("kafka", "kafka_2.13") == jars.locked_version("kafka", "kafka-clients") == "4.3.1"
    assert jars.locked_version("spark", "kafka-clients") == "3.9.2"
