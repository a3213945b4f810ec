"""MQTT 5 with paho-mqtt: subscribe, publish three readings at QoS 1, receive them.

python examples/mqtt_paho.py [HOST:PORT] [TOPIC]
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import paho.mqtt.client as mqtt

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:1883"
topic = sys.argv[2] if len(sys.argv) > 2 else "house"  # a Kafka topic; what follows the slash is the key
readings = ["21.5", "21.7", "21.6"]
received: queue.Queue[mqtt.MQTTMessage] = queue.Queue()
subscribed: queue.Queue[list[Any]] = queue.Queue()

client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
client.on_connect = lambda client, *_: client.subscribe(f"{topic}/#", qos=1)
client.on_subscribe = lambda _client, _data, _id, codes, _properties: subscribed.put(codes)
client.on_message = lambda _client, _data, message: received.put(message)

host, _, port = address.rpartition(":")
client.connect(host, int(port))
client.loop_start()
codes = subscribed.get(timeout=30)  # no message is missed after SUBACK
if any(code.is_failure for code in codes):
    sys.exit(f"the subscription was refused: {codes}")
for reading in readings:
    sent = client.publish(f"{topic}/kitchen/temp", reading, qos=1)
    sent.wait_for_publish(30)  # PUBACK: every in-sync replica of Kafka has it
for _ in readings:
    message = received.get(timeout=30)
    print(message.topic.partition("/")[2], message.payload.decode())
client.disconnect()
client.loop_stop()
