// MQTT 5 with MQTT.js: subscribe, publish three readings at QoS 1, receive them.
// node examples/mqtt_mqttjs.js [HOST:PORT] [TOPIC]          (npm install mqtt)

const mqtt = require("mqtt");

const [address = "127.0.0.1:1883", topic = "house"] = process.argv.slice(2);
const readings = ["21.5", "21.7", "21.6"];

async function main() {
  const client = await mqtt.connectAsync(`mqtt://${address}`, { protocolVersion: 5 });
  let left = readings.length;
  const all = new Promise((resolve) => {
    client.on("message", (name, payload) => {
      console.log(name.slice(topic.length + 1), payload.toString());
      if (--left === 0) resolve();
    });
  });
  await client.subscribeAsync(`${topic}/#`, { qos: 1 }); // no message is missed after SUBACK
  for (const reading of readings) {
    await client.publishAsync(`${topic}/kitchen/temp`, reading, { qos: 1 }); // PUBACK: Kafka has it
  }
  await all;
  await client.endAsync();
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
