// Drives MQTT.js by the line protocol of drivers.py: commands on standard input, answers and events on standard output.

import { createHash, createHmac, pbkdf2Sync, randomBytes } from "node:crypto";
import { createInterface } from "node:readline";
import mqtt from "mqtt";

const clients = new Map();

const say = (object) => process.stdout.write(JSON.stringify(object) + "\n");
const camel = (name) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
const snake = (name) => name.replace(/[A-Z]/g, (letter) => "_" + letter.toLowerCase());
const BYTES = new Set(["correlationData", "authenticationData"]);
const FLAGS = new Set(["payloadFormatIndicator", "requestResponseInformation", "requestProblemInformation"]);

// MQTT.js has user properties as an object, which keeps the order of pairs with the same name only.
function toLibrary(properties = {}) {
  const out = {};
  for (const [key, value] of Object.entries(properties)) {
    const name = camel(key);
    if (name === "userProperties") {
      out[name] = {};
      for (const [own, text] of value) out[name][own] = [...(out[name][own] ?? []), text];
    } else if (BYTES.has(name)) out[name] = Buffer.from(value, "base64");
    else out[name] = FLAGS.has(name) ? Boolean(value) : value;
  }
  return out;
}

function fromLibrary(properties = {}) {
  const out = {};
  for (const [name, value] of Object.entries(properties)) {
    if (name === "userProperties")
      out.user_properties = Object.entries(value).flatMap(([key, own]) => [own].flat().map((text) => [key, text]));
    else if (name === "subscriptionIdentifier") out.subscription_identifiers = [value].flat();
    else if (BYTES.has(name)) out[snake(name)] = value.toString("base64");
    else out[snake(name)] = typeof value === "boolean" ? Number(value) : value;
  }
  return out;
}

// RFC 5802 and 7677, without channel binding.
class Scram {
  constructor({ user, password }) {
    this.password = password;
    this.nonce = randomBytes(18).toString("base64");
    this.bare = `n=${user},r=${this.nonce}`;
  }

  first() {
    return Buffer.from("n,," + this.bare);
  }

  final(challenge) {
    const fields = Object.fromEntries(challenge.split(",").map((part) => [part[0], part.slice(2)]));
    if (!fields.r.startsWith(this.nonce)) throw new Error("the server's nonce does not continue ours");
    const salted = pbkdf2Sync(this.password, Buffer.from(fields.s, "base64"), Number(fields.i), 32, "sha256");
    const hmac = (key, text) => createHmac("sha256", key).update(text).digest();
    const key = hmac(salted, "Client Key");
    const without = `c=biws,r=${fields.r}`;
    const message = [this.bare, challenge, without].join(",");
    const signature = hmac(createHash("sha256").update(key).digest(), message);
    this.expected = "v=" + hmac(hmac(salted, "Server Key"), message).toString("base64");
    return Buffer.from(`${without},p=${key.map((byte, at) => byte ^ signature[at]).toString("base64")}`);
  }
}

function options(command, stores) {
  const properties = toLibrary(command.properties);
  const out = {
    host: command.host,
    hostname: command.host,
    port: command.port,
    protocol: command.path ? "ws" : "mqtt",
    path: command.path ?? "",
    protocolVersion: command.version,
    clientId: command.id,
    clean: command.clean,
    keepalive: command.keep_alive,
    reconnectPeriod: 0,
    resubscribe: false,
    autoAssignTopicAlias: command.send_aliases,
    username: command.user ?? undefined,
    password: command.password ?? undefined,
    ...stores,
  };
  if (command.scram) {
    properties.authenticationMethod = "SCRAM-SHA-256";
    properties.authenticationData = command.scram.first();
  }
  if (command.version === 5) out.properties = properties;
  if (command.will) {
    const { payload, properties: own, ...rest } = command.will;
    out.will = { ...rest, payload: Buffer.from(payload, "base64") };
    if (command.version === 5) out.will.properties = toLibrary(own);
  }
  return out;
}

function connect(command) {
  if (command.scram) command.scram = new Scram(command.scram);
  const known = clients.get(command.client);
  return new Promise((resolve, reject) => {
    const waiting = { resolve, reject, scram: command.scram };
    if (known) {
      Object.assign(known.waiting, waiting, { answered: false });
      Object.assign(known.client.options, options(command, known.stores));
      known.client.reconnect(known.stores);
      return;
    }
    const stores = {
      incomingStore: new mqtt.Store({ clean: false }),
      outgoingStore: new mqtt.Store({ clean: false }),
    };
    const client = mqtt.connect(options(command, stores));
    const state = { client, stores, waiting, aliases: new Map() };
    clients.set(command.client, state);
    client.on("packetreceive", (packet) => received(command.client, state, packet));
    client.on("message", (topic, payload, packet) =>
      say({
        client: command.client,
        event: "message",
        topic,
        payload: payload.toString("base64"),
        qos: packet.qos,
        retain: packet.retain,
        dup: packet.dup,
        properties: fromLibrary(packet.properties),
      }),
    );
    client.on("error", (error) => (state.error = String(error)));
    client.on("close", () => {
      if (!state.waiting.answered) state.waiting.reject(new Error(state.error ?? "closed without CONNACK"));
      state.waiting.answered = true;
      say({ client: command.client, event: "closed", ...state.goodbye });
      state.goodbye = {};
    });
    client.handleAuth = (packet, done) => {
      const data = state.waiting.scram.final(packet.properties.authenticationData.toString());
      const properties = { authenticationMethod: "SCRAM-SHA-256", authenticationData: data };
      done(null, { cmd: "auth", reasonCode: 0x18, properties });
    };
  });
}

function received(name, state, packet) {
  if (packet.cmd === "connack") {
    const reason = packet.reasonCode ?? packet.returnCode;
    const proof = packet.properties?.authenticationData?.toString();
    if (reason === 0 && state.waiting.scram && proof !== state.waiting.scram.expected)
      state.waiting.reject(new Error("the server did not prove that it knows the password"));
    else state.waiting.resolve({ reason, session_present: packet.sessionPresent, properties: fromLibrary(packet.properties) });
    state.waiting.answered = true;
  } else if (packet.cmd === "disconnect") {
    state.goodbye = { reason: packet.reasonCode, properties: fromLibrary(packet.properties) };
  }
}

const answer = (packet, reasons) => ({ reasons, properties: fromLibrary(packet?.properties) });

const verbs = {
  connect,

  subscribe: ({ client, filters, properties }) =>
    new Promise((resolve, reject) => {
      const topics = {};
      for (const { filter, qos, no_local: nl, retain_as_published: rap, retain_handling: rh } of filters)
        topics[filter] = { qos, nl, rap, rh };
      clients.get(client).client.subscribe(topics, { properties: toLibrary(properties) }, (error, granted, packet) =>
        packet ? resolve(answer(packet, packet.granted)) : reject(error),
      );
    }),

  unsubscribe: ({ client, filters }) =>
    new Promise((resolve, reject) => {
      clients.get(client).client.unsubscribe(filters, {}, (error, packet) =>
        packet ? resolve(answer(packet, packet.granted ?? null)) : reject(error),
      );
    }),

  publish: ({ client, topic, payload, qos, retain, properties }) =>
    new Promise((resolve, reject) => {
      const publishing = { qos, retain, properties: toLibrary(properties) };
      clients.get(client).client.publish(topic, Buffer.from(payload, "base64"), publishing, (error, packet) => {
        if (error && packet?.reasonCode === undefined) reject(error);
        else resolve({ reason: packet?.reasonCode ?? 0, properties: qos ? fromLibrary(packet?.properties) : {} });
      });
    }),

  flush: () => ({}),

  disconnect: ({ client, reason, properties }) =>
    new Promise((resolve) => {
      const said = { reasonCode: reason, properties: toLibrary(properties) };
      clients.get(client).client.end(false, said, () => resolve({}));
    }),

  release: ({ client }) =>
    new Promise((resolve) => {
      clients.get(client).client.end(true, {}, () => resolve({}));
      clients.delete(client);
    }),
};

say({ event: "ready", name: "MQTT.js", version: mqtt.MqttClient.VERSION });
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  // Not awaited, because a publish may be answered after a later command. Packets are still sent in the lines' order.
  Promise.resolve()
    .then(() => verbs[command.do](command))
    .then((result) => say({ n: command.n, result }))
    .catch((error) => say({ n: command.n, error: String(error) }));
}
process.exit(0);
