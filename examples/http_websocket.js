// The live WebSocket of HTTP with ws: subscribe with credit, produce three readings, receive them.
// node examples/http_websocket.js [HOST:PORT] [TOPIC]          (npm install ws)

const WebSocket = require("ws");

const [address = "127.0.0.1:8080", topic = "house"] = process.argv.slice(2);
const records = [21.5, 21.7, 21.6].map((value) => ({ key: "kitchen/temp", value }));
let left = records.length;

const socket = new WebSocket(`ws://${address}/stream`, ["trivium.v1"]);
const say = (message) => socket.send(JSON.stringify(message));

socket.on("open", () => say({ type: "subscribe", id: "s", topic, from: "end", credit: 2 }));
socket.on("message", (data) => {
  const said = JSON.parse(data);
  if (said.type === "subscribed") say({ type: "produce", id: "p", topic, records }); // no later record is missed
  if (said.type === "produced" && said.offsets.some((one) => one.error_code)) fail(JSON.stringify(said.offsets));
  if (said.type === "record") {
    console.log(said.record.key, said.record.value);
    say({ type: "credit", id: "s", credit: 1 }); // allow one more record
    if (--left === 0) socket.close();
  }
  if (said.type === "error") fail(said.message);
});
socket.on("error", (error) => fail(error.message));

function fail(text) {
  console.error(text);
  process.exit(1);
}
