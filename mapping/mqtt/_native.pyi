from mapping.mqtt.runs import map_run as map_run
