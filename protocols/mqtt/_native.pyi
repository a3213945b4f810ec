from protocols.mqtt.usual import take_usual as take_usual
