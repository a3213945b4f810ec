// A Sparkplug edge node of Eclipse Tahu: births of the node and its devices, then data of all devices in turn.
// node sparkplug.mjs URL GROUP NODE DEVICES ROUNDS
import sparkplug from "sparkplug-client";

const [url, groupId, edgeNode, devices, rounds] = process.argv.slice(2);
const names = Array.from({ length: Number(devices) }, (_, number) => `d${number}`);
const metric = (value) => ({ timestamp: Date.now(), metrics: [{ name: "temperature", value, type: "Int32" }] });
const client = sparkplug.newClient({
  serverUrl: url, username: "", password: "", groupId, edgeNode, clientId: edgeNode, version: "spBv1.0", publishDeath: true,
});
client.on("birth", () => {
  client.publishNodeBirth(metric(0));
  for (const name of names) client.publishDeviceBirth(name, metric(0));
  for (let round = 1; round <= Number(rounds); round += 1) {
    client.publishNodeData(metric(round));
    for (const name of names) client.publishDeviceData(name, metric(round));
  }
  client.stop();
});
client.on("error", (error) => { console.error(error); process.exit(1); });
client.on("close", () => process.exit(0));
