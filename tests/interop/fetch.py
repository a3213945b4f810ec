"""`python -m tests.interop.fetch` fetches and builds all foreign clients (`make clients`); `lock` writes their locks.

`classpath SET` prints the class path of a set of jars (`qpid-jms`, `hivemq`). A test run fetches what is missing.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.interop.amqp import clients as amqp
from tests.interop.mqtt import clients as mqtt
from tests.interop.toolchains import ToolchainError, classpath, go_program, lock_crates, node_packages

HERE = Path(__file__).parent
HELM = HERE / "deploy" / "helm"


def main(arguments: list[str]) -> int:
    """Run the command; return 1 if a client cannot be fetched or built."""
    try:
        if arguments == ["lock"]:
            lock_crates(amqp.RUST)
            return 0
        if arguments[:1] == ["classpath"]:
            print(classpath(*arguments[1:]))
            return 0
        with ThreadPoolExecutor() as pool:  # mostly other programs, some of which wait for the network
            fetches: list[Future[object]] = [
                pool.submit(command) for command in (*mqtt.DRIVERS.values(), *amqp.DRIVERS.values())
            ]
            fetches.append(pool.submit(node_packages, HERE / "http" / "node"))
            fetches.append(pool.submit(go_program, HELM))
        for fetched in fetches:
            fetched.result()
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
