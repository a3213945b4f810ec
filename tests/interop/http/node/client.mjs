// One run against a gateway: `node client.mjs URL TOPIC`. It uses fetch, EventSource and WebSocket, and prints all
// answers as one JSON object. The topic must be empty and have one partition.

import { EventSource } from "eventsource";
import WebSocket from "ws";

const [url, topic] = process.argv.slice(2);
const CONTROL = { "Content-Type": "application/vnd.kafka.v2+json" };
const JSON_RECORDS = { "Content-Type": "application/vnd.kafka.json.v2+json" };

async function ask(method, path, body, headers = CONTROL) {
  const response = await fetch(url + path, {
    method,
    headers: body === undefined ? {} : headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await response.text();
  return { status: response.status, body: text === "" ? null : JSON.parse(text) };
}

// Produces records with fetch: one request, then an upload of lines while it reads the answer's lines.

async function produce() {
  const answer = await ask("POST", `/topics/${topic}`, { records: [{ key: "é", value: { n: 0 } }] }, JSON_RECORDS);
  const lines = [1, 2, 3].map((n) => `{"key":"k","value":{"n":${n}}}\n`);
  const body = new ReadableStream({
    pull(controller) {
      if (lines.length === 0) controller.close();
      else controller.enqueue(new TextEncoder().encode(lines.shift()));
    },
  });
  const upload = await fetch(`${url}/topics/${topic}/records`, {
    method: "POST",
    headers: { "Content-Type": "application/x-ndjson" },
    body,
    duplex: "half",
  });
  const reports = (await upload.text()).trim().split("\n").map((line) => JSON.parse(line));
  return { single: answer, reports };
}

async function consume() {
  const group = `/consumers/${topic}`;
  const created = await ask("POST", group, { name: "node", format: "json", "auto.offset.reset": "earliest" });
  const base = `${group}/instances/node`;
  await ask("POST", `${base}/subscription`, { topics: [topic] });
  const values = [];
  while (values.length < 4) {
    const page = await ask("GET", `${base}/records?timeout=2000`);
    if (page.status !== 200) throw new Error(`poll: ${page.status}`);
    values.push(...page.body.map((record) => record.value.n));
  }
  const committed = await ask("POST", `${base}/offsets`);
  const deleted = await ask("DELETE", base);
  return { created: created.status, values, committed: committed.status, deleted: deleted.status };
}

// The gateway ends the stream after two events; EventSource reconnects by itself with the last event's id.

function listen() {
  return new Promise((resolve, reject) => {
    const source = new EventSource(`${url}/topics/${topic}/stream?from=beginning&limit=2`);
    const values = [];
    let opened = 0;
    source.addEventListener("open", () => (opened += 1));
    source.addEventListener("error", (event) => {
      if (event.code !== undefined) reject(new Error(`${event.code} ${event.message}`));
    });
    source.addEventListener("message", (event) => {
      values.push(JSON.parse(event.data).value.n);
      if (values.length === 4) {
        source.close();
        resolve({ opened, values });
      }
    });
  });
}

// A WebSocket: credit for three of the four stored records, then for the rest and the one that it stores.

function live() {
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(`${url.replace("http", "ws")}/stream`, ["trivium.v1"]);
    const say = (message) => socket.send(JSON.stringify(message));
    const values = [];
    let stored = null;
    socket.on("error", reject);
    socket.on("open", () => say({ type: "subscribe", id: "s", topic, from: "beginning", credit: 3 }));
    socket.on("message", (data) => {
      const said = JSON.parse(data);
      if (said.type === "error") reject(new Error(data));
      if (said.type === "record") values.push(said.record.value.n);
      if (said.type === "record" && values.length === 3) {
        say({ type: "produce", id: "p", topic, records: [{ value: { n: 4 } }] });
      }
      if (said.type === "produced") {
        stored = said.offsets;
        say({ type: "credit", id: "s", credit: 10 });
      }
      if (values.length === 5) socket.close();
    });
    socket.on("close", (code) => resolve({ protocol: socket.protocol, stored, values, code }));
  });
}

const told = { produce: await produce(), consume: await consume(), listen: await listen(), live: await live() };
console.log(JSON.stringify(told));
