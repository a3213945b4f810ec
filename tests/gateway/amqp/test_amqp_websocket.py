"""AMQP over WebSocket in a running gateway: on the HTTP port's path, and on a listener of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from proton import Collector, Connection, Event, Message, Transport

from tests.support.amqp_frames import Frames
from tests.support.gateway import GatewayProcess

LISTENERS = {"http": "/amqp", "amqp_websocket": "/anything"}
SASL = b"AMQP\x03\x01\x00\x00"
OUTCOME = b"\x00\x53\x44\xc0\x03\x01\x50"  # and its code
TIMEOUT = 60


class Peer:
    """proton's engine as the client; its bytes go over a WebSocket, `size` of them in a frame."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, size: int) -> None:
        self.socket = socket
        self.size = size
        self.connection, self.transport, self.collector = Connection(), Transport(), Collector()
        self.connection.collect(self.collector)
        self.connection.container = "over-websocket"
        self.transport.sasl().allowed_mechs("ANONYMOUS")
        self.transport.bind(self.connection)
        self.received: list[Any] = []
        self.accepted = 0

    async def write(self) -> None:
        while (pending := self.transport.pending()) > 0:
            data = bytes(self.transport.peek(pending))
            self.transport.pop(pending)
            for at in range(0, len(data), self.size):
                await self.socket.send_bytes(data[at : at + self.size])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT):
            await self.write()
            while not condition():
                message = await self.socket.receive()
                assert message.type is aiohttp.WSMsgType.BINARY, message
                data = message.data
                while data:
                    room = self.transport.capacity()
                    self.transport.push(data[:room])
                    data = data[room:]
                self.process()
                await self.write()

    def process(self) -> None:
        while (event := self.collector.peek()) is not None:
            if event.type is Event.DELIVERY:
                delivery = event.delivery
                if delivery.link.is_receiver and delivery.readable and not delivery.partial:
                    message = Message()
                    message.decode(delivery.link.recv(delivery.pending))
                    self.received.append(message.body)
                    delivery.link.advance()
                    delivery.update(delivery.ACCEPTED)
                    delivery.settle()
                elif delivery.link.is_sender and delivery.remote_state == delivery.ACCEPTED:
                    self.accepted += 1
                    delivery.settle()
            self.collector.pop()


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_there_and_back(gateway: GatewayProcess, new_topic: Any, listener: str, size: int) -> None:
    topic = await new_topic()
    url = f"ws://{gateway.addresses[listener]}{LISTENERS[listener]}"
    async with aiohttp.ClientSession() as http, http.ws_connect(url, protocols=("amqp",)) as socket:
        assert socket.protocol == "amqp"
        peer = Peer(socket, size)
        peer.connection.open()
        session = peer.connection.session()
        session.open()
        receiver = session.receiver("in")
        receiver.source.address = f"queue://{topic}"
        receiver.source.capabilities.put_object("queue")
        receiver.open()
        receiver.flow(10)
        sender = session.sender("out")
        sender.target.address = topic
        sender.open()
        await peer.until(lambda: sender.credit > 0 and receiver.state & receiver.REMOTE_ACTIVE)
        bodies = [f"message {number}" for number in range(3)]
        for number, body in enumerate(bodies):
            sender.delivery(f"d{number}")
            sender.send(Message(body).encode())
            sender.advance()
        await peer.until(lambda: peer.accepted == 3 and len(peer.received) == 3)
        assert sorted(peer.received) == bodies
        peer.connection.close()
        await peer.until(lambda: bool(peer.connection.state & peer.connection.REMOTE_CLOSED))
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_sasl_comes_first_where_a_login_is_needed_and_knows_the_certificate(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    authority = trustme.CA()
    server, device = authority.issue_cert("127.0.0.1"), authority.issue_cert("device.test", common_name="device-7")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, leaf in (("server", server), ("device", device)):
        leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    config = f"""
        [security]
        allow_anonymous = false
        tls_cert = "{tmp_path}/server.pem"
        tls_key = "{tmp_path}/server.pem"
        tls_client_ca = "{tmp_path}/ca.pem"
        """
    gateway = await new_gateway(bootstrap, config=config).start()
    url = f"wss://{gateway.addresses['http']}/amqp"
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with aiohttp.ClientSession() as http, asyncio.timeout(TIMEOUT):
        async with http.ws_connect(url, protocols=("amqp",), ssl=context) as socket:
            await socket.send_bytes(Frames.HEADER)
            assert await socket.receive_bytes() == SASL
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        context.load_cert_chain(tmp_path / "device.pem")
        async with http.ws_connect(url, protocols=("amqp",), ssl=context) as socket:
            init = Frames.performative(0x41, Frames.symbol("EXTERNAL"), Frames.binary(b""))
            await socket.send_bytes(SASL + Frames.frame(init, kind=1))
            heard = b""
            while OUTCOME not in heard:
                heard += await socket.receive_bytes()
            assert b"\x08EXTERNAL" in heard
            assert heard.endswith(OUTCOME + b"\x00")
    assert await gateway.stop() == 0


async def test_the_subprotocol_is_amqp(gateway: GatewayProcess) -> None:
    url = f"http://{gateway.addresses['http']}/amqp"
    async with aiohttp.ClientSession() as http:
        for protocols in ((), ("mqtt",)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(url, protocols=protocols)
            assert refused.value.status == 400
        async with http.get(url) as response:
            assert response.status == 426
