// Drives rhea by the line protocol of drivers.py: commands on standard input, answers and events on standard output.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import rhea from "rhea";
import WebSocket from "ws";

const { types, message } = rhea;
const VERSION = JSON.parse(readFileSync(new URL("node_modules/rhea/package.json", import.meta.url))).version;
const clients = new Map();
let deliveries = 0;

const say = (object) => process.stdout.write(JSON.stringify(object) + "\n");

const WRAPS = {
  "@binary": (text) => Buffer.from(text, "base64"),
  "@uuid": (text) => types.wrap_uuid(Buffer.from(text.replaceAll("-", ""), "hex")),
  "@symbol": types.wrap_symbol,
  "@timestamp": (ms) => new Date(ms),
  "@ulong": types.wrap_ulong,
  "@uint": types.wrap_uint,
  "@int": types.wrap_int,
};

function toLibrary(told) {
  if (Array.isArray(told)) return told.map(toLibrary);
  if (typeof told === "number" && Number.isInteger(told)) return types.wrap_long(told);
  if (told === null || typeof told !== "object") return told;
  const [[tag, value] = [""]] = Object.entries(told);
  return tag in WRAPS ? WRAPS[tag](value) : Object.fromEntries(Object.entries(told).map(([key, one]) => [key, toLibrary(one)]));
}

function fromLibrary(value) {
  if (value === null || value === undefined) return null;
  if (Buffer.isBuffer(value)) return { "@binary": value.toString("base64") };
  if (value instanceof Date) return { "@timestamp": value.getTime() };
  if (Array.isArray(value)) return value.map(fromLibrary);
  if (typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, fromLibrary(one)]));
  return value;
}

// Fields that are copied unchanged: the line protocol's names, and rhea's where they differ.
const FIELDS = {
  to: "to",
  subject: "subject",
  reply_to: "reply_to",
  content_type: "content_type",
  content_encoding: "content_encoding",
  group_id: "group_id",
  group_sequence: "group_sequence",
  reply_to_group_id: "reply_to_group_id",
  durable: "durable",
  priority: "priority",
  ttl: "ttl",
  expiry: "absolute_expiry_time",
  creation: "creation_time",
};

function toMessage(told) {
  const out = {};
  for (const [name, own] of Object.entries(FIELDS)) if (name in told) out[own] = told[name];
  for (const [name, own] of [["id", "message_id"], ["correlation_id", "correlation_id"]])
    if (name in told) out[own] = told[name]["@binary"] ? types.wrap_binary(toLibrary(told[name])) : toLibrary(told[name]);
  if (told.user_id) out.user_id = toLibrary(told.user_id);
  if (told.annotations) out.message_annotations = toLibrary(told.annotations);
  if (told.application) out.application_properties = toLibrary(told.application);
  if ("value" in told) out.body = toLibrary(told.value);
  else if (told.sequences) out.body = message.sequence_sections(told.sequences.map(toLibrary));
  else out.body = message.data_sections(told.data.map((one) => Buffer.from(one, "base64")));
  return out;
}

function fromMessage(seen, delivery, number) {
  const told = { delivery: number, settled: Boolean(delivery.remote_settled), delivery_count: seen.delivery_count ?? 0 };
  for (const [name, own] of Object.entries(FIELDS)) if (own in seen) told[name] = Number(seen[own]) || seen[own];
  for (const [name, own] of [["id", "message_id"], ["correlation_id", "correlation_id"], ["user_id", "user_id"]])
    if (own in seen) told[name] = fromLibrary(seen[own]);
  told.annotations = fromLibrary(seen.message_annotations ?? {});
  told.application = fromLibrary(seen.application_properties ?? {});
  const sections = seen.body?.collect_sections ? (seen.body.multiple ? seen.body.content : [seen.body.content]) : null;
  if (sections === null) told.value = fromLibrary(seen.body);
  else if (seen.body.typecode === 0x75) told.data = sections.map((one) => one.toString("base64"));
  else told.sequences = sections.map(fromLibrary);
  return told;
}

const reason = (error) => (error ? `${error.condition ?? error.name}: ${error.description ?? error.message}` : "closed without an error");

class Link {
  constructor(command) {
    this.role = command.role;
    this.incoming = [];
    this.waiting = [];
    this.unsent = [];
    this.held = new Map();
    this.pending = new Map();
  }

  pump() {
    while (this.unsent.length && this.end.sendable()) {
      const { told, done } = this.unsent.shift();
      const delivery = this.end.send(toMessage(told));
      if (this.end.snd_settle_mode === 1) done(null);
      else this.pending.set(delivery, done);
    }
  }

  settled(name, delivery) {
    const error = delivery.remote_state?.error;
    this.pending.get(delivery)(
      error ? { name, condition: error.condition, description: error.description } : { name },
    );
    this.pending.delete(delivery);
  }

  serve() {
    while (this.waiting.length && this.incoming.length >= this.waiting[0].count) {
      const { count, done } = this.waiting.shift();
      done({ messages: this.incoming.splice(0, count) });
    }
  }
}

const verbs = {
  connect: (command) =>
    new Promise((resolve, reject) => {
      const container = rhea.create_container({ id: command.container });
      const secure = command.tls && {
        transport: "tls",
        ca: [readFileSync(command.tls.ca)],
        cert: command.tls.cert && readFileSync(command.tls.cert),
        key: command.tls.key && readFileSync(command.tls.key),
        enable_sasl_external: command.mechanism === "EXTERNAL",
        servername: "",
      };
      const options = {
        host: command.host,
        port: command.port,
        hostname: command.host,
        reconnect: false,
        username: command.user ?? (command.mechanism === "ANONYMOUS" ? "anonymous" : undefined),
        [command.mechanism === "XOAUTH2" ? "token" : "password"]: command.password ?? undefined,
        idle_time_out: command.idle_ms,
        max_frame_size: command.frame_bytes,
        ...secure,
      };
      if (command.path) {
        const connect = container.websocket_connect(WebSocket);
        options.connection_details = connect(`ws://${command.host}:${command.port}${command.path}`, ["amqp"]);
      }
      const client = { container, links: new Map() };
      clients.set(command.client, client);
      client.connection = container.connect(options);
      client.connection.on("connection_open", () => resolve({}));
      client.connection.on("connection_error", (context) => (client.reason = reason(context.connection.error)));
      client.connection.on("connection_close", () => client.closing?.({}));
      client.connection.on("disconnected", (context) => {
        client.reason ??= reason(context.error);
        if (!client.closing) say({ client: command.client, event: "closed", reason: client.reason });
        client.closing?.({});
        reject(new Error(client.reason));
      });
      for (const event of ["error", "protocol_error"]) container.on(event, (error) => (client.reason = reason(error)));
    }),

  attach: (command) =>
    new Promise((resolve, reject) => {
      const client = clients.get(command.client);
      const link = new Link(command);
      client.links.set(command.link, link);
      const terminus = { address: command.address ?? undefined, dynamic: Boolean(command.dynamic) };
      if (command.durable) Object.assign(terminus, { durable: 2, expiry_policy: "never" });
      if (command.copy) terminus.distribution_mode = "copy";
      if (command.capabilities) terminus.capabilities = command.capabilities;
      if (command.filters?.length) {
        terminus.filter = {};
        for (const [name, value] of command.filters) {
          if (name.includes("selector")) Object.assign(terminus.filter, rhea.filter.selector(value));
          else terminus.filter[name] = types.wrap_described(toLibrary(value), name);
        }
      }
      const common = { name: command.link, ...(command.settled && { snd_settle_mode: 1 }) };
      if (command.role === "sender") {
        link.end = client.connection.open_sender({ ...common, target: terminus, treat_modified_as_released: false });
        link.end.on("sendable", () => link.pump());
        for (const name of ["accepted", "rejected", "released", "modified"])
          link.end.on(name, (context) => link.settled(name, context.delivery));
      } else {
        const credit = { credit_window: command.credit, autoaccept: false };
        link.end = client.connection.open_receiver({ ...common, source: terminus, ...credit });
        link.end.on("message", (context) => {
          link.held.set(++deliveries, context.delivery);
          link.incoming.push(fromMessage(context.message, context.delivery, deliveries));
          link.serve();
          // rhea reports a drained link only after the gateway's flow, which does not come if all credit is used up.
        });
        link.end.on("receiver_drained", () => {
          link.end.drain = false;
          link.drained?.({});
        });
      }
      link.end.on(`${command.role}_open`, () => {
        const remote = command.role === "sender" ? link.end.target : link.end.source;
        if (remote && remote.value !== null) resolve({ address: remote.address ?? null, filters: Object.keys(remote.filter ?? {}) });
      });
      link.end.on(`${command.role}_error`, () => (link.reason = reason(link.end.error)));
      link.end.on(`${command.role}_close`, () => {
        reject(new Error(link.reason ?? "closed without an error"));
        link.detaching?.({});
      });
    }),

  send: async (command) => {
    const link = clients.get(command.client).links.get(command.link);
    const sent = command.messages.map((told) => new Promise((done) => link.unsent.push({ told, done })));
    link.pump();
    return { outcomes: (await Promise.all(sent)).filter((outcome) => outcome !== null) };
  },

  receive: (command) =>
    new Promise((done) => {
      const link = clients.get(command.client).links.get(command.link);
      const waiting = { count: command.count, done };
      link.waiting.push(waiting);
      link.serve();
      const late = () => {
        if (!link.waiting.includes(waiting)) return;
        link.waiting.splice(link.waiting.indexOf(waiting), 1);
        done({ messages: link.incoming.splice(0, command.count) });
      };
      if (link.waiting.includes(waiting)) setTimeout(late, command.seconds * 1000).unref();
    }),

  settle: (command) => {
    const link = clients.get(command.client).links.get(command.link);
    for (const number of command.deliveries) {
      const delivery = link.held.get(number);
      link.held.delete(number);
      if (command.outcome === "accepted") delivery.accept();
      else if (command.outcome === "released") delivery.release();
      else if (command.outcome === "rejected")
        delivery.reject(command.condition && { condition: command.condition, description: "no" });
      else delivery.modified({ delivery_failed: Boolean(command.failed), undeliverable_here: Boolean(command.undeliverable) });
    }
    return {};
  },

  credit: (command) => {
    clients.get(command.client).links.get(command.link).end.add_credit(command.count);
    return {};
  },

  drain: (command) =>
    new Promise((resolve) => {
      const link = clients.get(command.client).links.get(command.link);
      link.drained = resolve;
      link.end.drain_credit();
    }),

  detach: (command) =>
    new Promise((resolve) => {
      const link = clients.get(command.client).links.get(command.link);
      link.detaching = resolve;
      if (command.close) link.end.close();
      else link.end.detach();
    }),

  close: (command) =>
    new Promise((resolve) => {
      const client = clients.get(command.client);
      client.closing = resolve;
      if (!client.connection.is_open()) resolve({});
      else client.connection.close();
    }),

  release: async (command) => {
    if (clients.has(command.client)) await verbs.close(command);
    clients.delete(command.client);
    return {};
  },
};

say({ event: "ready", name: "rhea", version: VERSION });
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  Promise.resolve()
    .then(() => verbs[command.do](command))
    .then((result) => say({ n: command.n, result }))
    .catch((error) => say({ n: command.n, error: error.message ?? String(error) }));
}
process.exit(0);
