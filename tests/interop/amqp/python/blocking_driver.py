"""proton's blocking client under the line protocol of drivers.py; each client has its own thread."""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import proton
from proton import ConnectionException, Link, LinkException, Timeout
from proton.utils import BlockingConnection, BlockingReceiver, BlockingSender

from tests.interop.amqp.python.messages import (
    OUTCOMES,
    Options,
    attached,
    connecting,
    from_proton,
    outcome_of,
    prepare,
    to_proton,
)
from tests.interop.python.lines import decode, say

TIMEOUT_S = 60


class Client:
    """One connection; proton must be used in one thread only."""

    def __init__(self) -> None:
        self.commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.connection: BlockingConnection | None = None
        self.links: dict[str, Any] = {}
        self.deliveries: dict[int, Any] = {}
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while command := self.commands.get():
            try:
                result = getattr(self, command["do"])(command)
            except LinkException as error:
                say(n=command["n"], error=str(error))
            except Exception as error:  # report any error to the test
                say(n=command["n"], error=repr(error))
            else:
                say(n=command["n"], result=result or {})

    def connect(self, command: dict[str, Any]) -> None:
        self.connection = BlockingConnection(
            timeout=TIMEOUT_S, container_id=command["container"], **connecting(command)
        )

    def attach(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.connection is not None
        role, options = command["role"], Options(command)
        link: BlockingSender | BlockingReceiver
        if role == "sender":
            link = self.connection.create_sender(command["address"], name=command["link"], options=options)
        else:
            link = self.connection.create_receiver(
                command["address"], credit=command["credit"], name=command["link"], options=options
            )
        self.links[command["link"]] = link
        return attached(link.link, role)

    def send(self, command: dict[str, Any]) -> dict[str, Any]:
        sender = self.links[command["link"]]
        deliveries = [sender.send(to_proton(told), error_states=[]) for told in command["messages"]]
        if sender.link.snd_settle_mode == Link.SND_SETTLED:
            return {"outcomes": []}
        return {"outcomes": [outcome_of(one) for one in deliveries]}

    def receive(self, command: dict[str, Any]) -> dict[str, Any]:
        receiver = self.links[command["link"]]
        until = time.monotonic() + command["seconds"]
        messages = []
        while len(messages) < command["count"]:
            # proton's `receive` would grant a credit itself if the link has none.
            try:
                self.connection.wait(lambda: receiver.fetcher.has_message, timeout=max(0.0, until - time.monotonic()))
            except Timeout:
                break
            known = len(receiver.fetcher.unsettled)
            message = receiver.fetcher.pop()
            unsettled = len(receiver.fetcher.unsettled) > known
            number = len(self.deliveries)
            self.deliveries[number] = receiver.fetcher.unsettled[-1] if unsettled else None
            messages.append(from_proton(message, number, not unsettled))
        return {"messages": messages}

    def settle(self, command: dict[str, Any]) -> None:
        receiver = self.links[command["link"]]
        for number in command["deliveries"]:
            delivery = self.deliveries[number]
            receiver.fetcher.unsettled.remove(delivery)
            receiver.fetcher.unsettled.appendleft(delivery)  # so that `settle` settles this one
            prepare(delivery, command)
            receiver.settle(OUTCOMES[command["outcome"]])
        self.flush()

    def credit(self, command: dict[str, Any]) -> None:
        self.links[command["link"]].link.flow(command["count"])
        self.flush()

    def drain(self, command: dict[str, Any]) -> None:
        assert self.connection is not None
        link = self.links[command["link"]].link
        link.drain(0)
        self.connection.wait(lambda: not link.draining(), timeout=TIMEOUT_S)

    def flush(self) -> None:
        """Write pending output, since the blocking client only writes while it waits."""
        assert self.connection is not None
        transport = self.connection.conn.transport
        self.connection.wait(lambda: transport.pending() <= 0, timeout=TIMEOUT_S)

    def detach(self, command: dict[str, Any]) -> None:
        link = self.links.pop(command["link"])
        if command["close"]:
            link.close()
        else:
            link.detach()

    def close(self, command: dict[str, Any]) -> None:
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.close()

    def release(self, command: dict[str, Any]) -> None:
        try:
            self.close(command)
        except (ConnectionException, LinkException):
            return


def main() -> None:
    clients: dict[str, Client] = {}
    say(event="ready", name="proton's blocking client", version=".".join(map(str, proton.VERSION)))
    for line in sys.stdin:
        command = decode(line)
        name = command["client"]
        client = clients.get(name)
        if client is None:
            client = clients[name] = Client()
        client.commands.put(command)
        if command["do"] == "release":
            del clients[name]
            client.commands.put(None)


if __name__ == "__main__":
    main()
