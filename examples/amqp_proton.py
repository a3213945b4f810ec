"""AMQP 1.0 with python-qpid-proton: send three readings, receive them as a member of a consumer group, accept them.

python examples/amqp_proton.py [HOST:PORT] [TOPIC]
"""

from __future__ import annotations

import sys

from proton import Message
from proton.utils import BlockingConnection

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:5672"
topic = sys.argv[2] if len(sys.argv) > 2 else "house"
readings = ["21.5", "21.7", "21.6"]

connection = BlockingConnection(f"amqp://{address}", timeout=30)
sender = connection.create_sender(f"{topic}/kitchen/temp")  # the Kafka topic, and the key after the slash
for reading in readings:
    # A data section, whose bytes become the record's value. Returns on `accepted`: every in-sync replica has it.
    sender.send(Message(body=reading.encode(), inferred=True))
receiver = connection.create_receiver(f"{topic}/group.id/amqp-proton", credit=10)
for _ in readings:
    message = receiver.receive(timeout=30)
    print(message.annotations["x-opt-bridge.key"], bytes(message.body).decode())
    receiver.accept()  # advances the group's offset
connection.close()
