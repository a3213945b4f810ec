"""A process that has imported the gateway and forks one for each request: the imports cost more than most tests.

`python -m tests.support.fork_server FD`: FD is a socket (SOCK_SEQPACKET). A request is JSON, `{"number": N,
"arguments": [...], "environment": {...}}`, with the descriptor of the log. The answers are `{"number": N, "pid": PID}`,
and the same with `"returncode"` when that process has ended. The server ends when the other side closes the socket; the
gateways go on.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from typing import Any, Final

import gateway.process.app  # noqa: F401 - what `trivium up` imports
from gateway.process.cli import main

LARGEST: Final = 1 << 17
"""The largest request, in bytes; the environment is most of it."""


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Returns its request in the child, and None when the other side is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    text, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 1)
                    if not text:
                        return None
                    request: dict[str, Any] = json.loads(text)
                    pid = os.fork()
                    if pid == 0:
                        os.dup2(descriptors[0], 1)
                        os.dup2(descriptors[0], 2)
                        return request
                    os.close(descriptors[0])
                    answer = {"number": request["number"], "pid": pid}
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, answer)
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data["pid"], 0)
                    answer = {**key.data, "returncode": os.waitstatus_to_exitcode(status)}
                connection.send(json.dumps(answer).encode())


def become(request: dict[str, Any]) -> None:
    """Look like a process of its own: session, arguments, environment, no open file but the log."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["trivium", *request["arguments"]]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        found = serve(requests)
        if found is None:
            sys.exit()
        requests.detach()
    become(found)
    main()
