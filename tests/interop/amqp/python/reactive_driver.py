"""proton's reactive client under the line protocol of drivers.py: one container for all clients, driven by events."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

import proton
from proton import Endpoint, Link
from proton.handlers import MessagingHandler
from proton.reactor import ApplicationEvent, Container, EventInjector

from tests.interop.amqp.python.messages import (
    OUTCOMES,
    Options,
    attached,
    condition_of,
    connecting,
    from_proton,
    outcome_of,
    prepare,
    to_proton,
)
from tests.interop.python.lines import decode, say


class Waiting:
    """An unanswered `receive`."""

    def __init__(self, command: dict[str, Any]) -> None:
        self.command = command
        self.answered = False


class Links:
    """The driver's state of one link."""

    def __init__(self, link: Link, command: dict[str, Any]) -> None:
        self.link = link
        self.role = command["role"]
        self.window = command.get("credit", 0)
        self.attaching: int | None = command["n"]
        self.detaching: int | None = None
        self.draining: int | None = None
        self.incoming: deque[dict[str, Any]] = deque()
        self.waiting: deque[Waiting] = deque()
        self.unsent: deque[tuple[dict[str, Any], list[Any]]] = deque()


class Client(MessagingHandler):
    """One connection and its links."""

    def __init__(self, name: str, driver: Driver) -> None:
        super().__init__(prefetch=0, auto_accept=False, auto_settle=True)
        self.name, self.driver = name, driver
        self.links: dict[str, Links] = {}
        self.deliveries: dict[int, Any] = {}
        self.sends: list[tuple[int, list[Any]]] = []
        self.connection: Any = None
        self.connecting: int | None = None
        self.closing: int | None = None

    # commands

    def connect(self, command: dict[str, Any]) -> None:
        self.connecting = command["n"]
        self.closing = None
        self.links.clear()
        self.connection = self.driver.container.connect(
            handler=self, container_id=command["container"], **connecting(command)
        )

    def attach(self, command: dict[str, Any]) -> None:
        make = self.driver.container.create_sender
        if command["role"] == "receiver":
            make = self.driver.container.create_receiver
        link = make(self.connection, command["address"], name=command["link"], options=Options(command))
        self.links[command["link"]] = Links(link, command)

    def send(self, command: dict[str, Any]) -> None:
        kept = self.links[command["link"]]
        deliveries: list[Any] = []
        self.sends.append((command["n"], deliveries))
        for told in command["messages"]:
            deliveries.append(None)
            kept.unsent.append((told, deliveries))
        self.pump(kept)

    def receive(self, command: dict[str, Any]) -> None:
        kept = self.links[command["link"]]
        waiting = Waiting(command)
        kept.waiting.append(waiting)
        self.serve(kept)
        if not waiting.answered:
            self.driver.container.schedule(command["seconds"], Late(self, kept, waiting))

    def settle(self, command: dict[str, Any]) -> None:
        for number in command["deliveries"]:
            delivery = self.deliveries.pop(number)
            prepare(delivery, command)
            delivery.update(OUTCOMES[command["outcome"]])
            delivery.settle()
        say(n=command["n"], result={})

    def credit(self, command: dict[str, Any]) -> None:
        self.links[command["link"]].link.flow(command["count"])
        say(n=command["n"], result={})

    def drain(self, command: dict[str, Any]) -> None:
        kept = self.links[command["link"]]
        kept.draining = command["n"]
        kept.link.drain(0)
        self.drained(kept)

    def detach(self, command: dict[str, Any]) -> None:
        kept = self.links[command["link"]]
        kept.detaching = command["n"]
        if command["close"]:
            kept.link.close()
        else:
            kept.link.detach()

    def close(self, command: dict[str, Any]) -> None:
        if self.connection is None:
            say(n=command["n"], result={})
            return
        self.closing = command["n"]
        self.connection.close()

    release = close

    # events

    def on_connection_opened(self, event: Any) -> None:
        self.answer("connecting")

    def on_link_opened(self, event: Any) -> None:
        kept = self.links[event.link.name]
        terminus = event.link.remote_source if kept.role == "receiver" else event.link.remote_target
        if kept.attaching is None or terminus.type == proton.Terminus.UNSPECIFIED:
            return  # the gateway refuses the link: its detach with the reason follows
        number, kept.attaching = kept.attaching, None
        if kept.window:
            event.link.flow(kept.window)
        say(n=number, result=attached(event.link, kept.role))

    def on_link_remote_close(self, event: Any) -> None:
        self.gone(event.link)

    def on_link_remote_detach(self, event: Any) -> None:
        self.gone(event.link)

    def on_link_error(self, event: Any) -> None:
        """Replace proton's default, which closes the connection: on_link_remote_close handles the error."""

    def gone(self, link: Link) -> None:
        kept = self.links.get(link.name)
        if kept is None or kept.link != link:
            return
        del self.links[link.name]
        if kept.attaching is not None:
            say(n=kept.attaching, error=condition_of(link))
        if kept.detaching is not None:
            say(n=kept.detaching, result={})
        elif link.state & Endpoint.LOCAL_ACTIVE:
            link.close()

    def on_sendable(self, event: Any) -> None:
        self.pump(self.links[event.link.name])

    def pump(self, kept: Links) -> None:
        while kept.unsent and kept.link.credit:
            told, deliveries = kept.unsent.popleft()
            delivery = kept.link.send(to_proton(told))
            deliveries[deliveries.index(None)] = delivery
            delivery.context = {"outcome": None}
        self.finish()

    def on_accepted(self, event: Any) -> None:
        self.outcome(event.delivery)

    on_rejected = on_released = on_modified = on_accepted

    def outcome(self, delivery: Any) -> None:
        delivery.context["outcome"] = outcome_of(delivery)
        self.finish()

    def finish(self) -> None:
        for number, deliveries in list(self.sends):
            if None in deliveries:
                continue
            if deliveries and deliveries[0].link.snd_settle_mode == Link.SND_SETTLED:
                outcomes: list[Any] = []
            else:
                outcomes = [one.context["outcome"] for one in deliveries]
            if None not in outcomes:
                self.sends.remove((number, deliveries))
                say(n=number, result={"outcomes": outcomes})

    def on_message(self, event: Any) -> None:
        kept = self.links[event.link.name]
        number = self.driver.next_delivery()
        if not event.delivery.settled:
            self.deliveries[number] = event.delivery
        kept.incoming.append(from_proton(event.message, number, event.delivery.settled))
        if kept.window and kept.draining is None:
            event.link.flow(kept.window - event.link.credit)
        self.serve(kept)
        self.drained(kept)

    def on_link_flow(self, event: Any) -> None:
        kept = self.links.get(event.link.name)
        if kept is not None and kept.role == "receiver":
            self.drained(kept)

    def drained(self, kept: Links) -> None:
        if kept.draining is not None and not kept.link.draining():
            number, kept.draining = kept.draining, None
            say(n=number, result={})

    def serve(self, kept: Links) -> None:
        while kept.waiting and len(kept.incoming) >= kept.waiting[0].command["count"]:
            self.give(kept, kept.waiting.popleft())

    def give(self, kept: Links, waiting: Waiting) -> None:
        waiting.answered = True
        count = min(waiting.command["count"], len(kept.incoming))
        messages = [kept.incoming.popleft() for _ in range(count)]
        say(n=waiting.command["n"], result={"messages": messages})

    def on_connection_closed(self, event: Any) -> None:
        if not self.answer("closing"):
            self.ended(condition_of(event.connection))

    def on_connection_error(self, event: Any) -> None:
        self.ended(condition_of(event.connection))

    def on_transport_error(self, event: Any) -> None:
        condition = event.transport.condition
        self.ended(f"{condition.name}: {condition.description}")

    def on_disconnected(self, event: Any) -> None:
        self.ended("disconnected")

    def ended(self, reason: str) -> None:
        if self.connecting is not None:
            say(n=self.connecting, error=reason)
        elif not self.answer("closing") and self.connection is not None:
            say(client=self.name, event="closed", reason=reason)
        self.connecting = self.connection = None

    def answer(self, what: str) -> bool:
        number = getattr(self, what)
        if number is None:
            return False
        setattr(self, what, None)
        if what == "closing":
            self.connection = None
        say(n=number, result={})
        return True


class Late:
    """Answers a `receive` when its time is over."""

    def __init__(self, client: Client, kept: Links, waiting: Waiting) -> None:
        self.client, self.kept, self.waiting = client, kept, waiting

    def on_timer_task(self, event: Any) -> None:
        if not self.waiting.answered:
            self.kept.waiting.remove(self.waiting)
            self.client.give(self.kept, self.waiting)


class Driver(MessagingHandler):
    """All clients, in the thread of the container."""

    def __init__(self) -> None:
        super().__init__()
        self.container = Container(self)
        self.injector = EventInjector()
        self.clients: dict[str, Client] = {}
        self.number = 0

    def next_delivery(self) -> int:
        self.number += 1
        return self.number

    def on_start(self, event: Any) -> None:
        event.container.selectable(self.injector)
        threading.Thread(target=self.read, daemon=True).start()
        say(event="ready", name="proton's reactive client", version=".".join(map(str, proton.VERSION)))

    def read(self) -> None:
        for line in sys.stdin:
            self.injector.trigger(ApplicationEvent("command", subject=decode(line)))
        self.injector.trigger(ApplicationEvent("end"))

    def on_command(self, event: Any) -> None:
        command = event.subject
        client = self.clients.get(command["client"])
        if client is None:
            client = self.clients[command["client"]] = Client(command["client"], self)
        try:
            getattr(client, command["do"])(command)
        except Exception as error:  # report any error to the test
            say(n=command["n"], error=repr(error))
        if command["do"] == "release":
            del self.clients[command["client"]]

    def on_end(self, event: Any) -> None:
        self.container.stop()
        self.injector.close()


if __name__ == "__main__":
    Driver().container.run()
