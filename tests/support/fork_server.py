"""A process that has imported the gateway and forks one for each request: the imports cost more than most tests.

`python -m tests.support.fork_server FD`: FD is a socket (SOCK_SEQPACKET). A request is JSON, `{"arguments": [...],
"environment": {...}}`, with the descriptor of the log; the answers are `{"pid": N}`, and `{"pid": N, "returncode": N}`
when that process has ended. It ends when the other side closes the socket; the gateways go on.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from typing import Any, Final

import gateway.app  # noqa: F401 - what `trivium up` imports
from gateway.cli import main

LARGEST: Final = 1 << 18
"""The largest request, in bytes; the environment is most of it."""


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Returns its request in the child, and None when the other side is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not connection:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    connection.send(
                        json.dumps({"pid": key.data, "returncode": os.waitstatus_to_exitcode(status)}).encode()
                    )
                    continue
                text, (*descriptors,), _, _ = socket.recv_fds(connection, LARGEST, 1)
                if not text:
                    return None
                (log,) = descriptors
                pid = os.fork()
                if pid == 0:
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    return dict(json.loads(text))
                os.close(log)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                connection.send(json.dumps({"pid": pid}).encode())


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
