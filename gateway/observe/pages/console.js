"use strict";
// Text from clients reaches the page as textContent only; no element, attribute or address is made of it.

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const number = (value) => whole.format(value);
const time = (seconds) => clock.format(new Date(seconds * 1000));

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)}\u00a0${units[unit]}`;
}

function lasted(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(seconds < 1 ? 2 : 1)}\u00a0s`;
  if (seconds < 120) return `${Math.round(seconds)}\u00a0s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)}\u00a0min` : `${Math.round(seconds / 3600)}\u00a0h`;
}

/* A column is its name after a sign for its style: # a number, = no line breaks, @ a user, ! a reason. */
const SETTINGS = { "#": "number", "=": "plain", "@": "user", "!": "why" };
const setting = (column) => SETTINGS[column[0]] || "";
const nameOf = (column) => (setting(column) ? column.slice(1) : column);

function make(kind, text, className) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* A table whose rows keep their identity, so that the focus stays while figures change.
   A cell is a text or {text, warn, share}; share, from 0 to 1, is drawn as a bar. */
class Table {
  constructor(id, columns, empty) {
    this.table = byId(id);
    this.columns = columns;
    this.empty = empty;
    this.rows = new Map();
    this.opened = new Set();
    this.table.setAttribute("role", "table");
    const head = this.table.createTHead();
    const row = head.insertRow();
    head.setAttribute("role", "rowgroup");
    row.setAttribute("role", "row");
    for (const column of columns) {
      const cell = make("th", nameOf(column), setting(column));
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      row.append(cell);
    }
    this.body = this.table.createTBody();
    this.body.setAttribute("role", "rowgroup");
  }

  row(more) {
    const row = make("tr");
    row.setAttribute("role", "row");
    this.columns.forEach((column, at) => {
      const cell = make(at ? "td" : "th", "", setting(column));
      cell.setAttribute("role", at ? "cell" : "rowheader");
      if (at) cell.dataset.name = nameOf(column);
      else cell.scope = "row";
      if (!at && more) cell.append(make("button"));
      row.append(cell);
    });
    return row;
  }

  /* entries: {key, cells, braked, more}; more, a list of texts, is shown when the row is opened */
  show(entries) {
    const seen = new Set();
    let after = null;
    for (const entry of entries) {
      if (seen.has(entry.key)) continue;
      seen.add(entry.key);
      let row = this.rows.get(entry.key);
      if (!row) {
        row = this.row(entry.more);
        this.rows.set(entry.key, row);
        if (entry.more) {
          const button = row.cells[0].firstChild;
          button.type = "button";
          button.addEventListener("click", () => {
            if (!this.opened.delete(entry.key)) this.opened.add(entry.key);
            button.setAttribute("aria-expanded", String(this.opened.has(entry.key)));
            this.details(entry.key, row);
          });
          button.setAttribute("aria-expanded", "false");
        }
      }
      row.classList.toggle("braked", Boolean(entry.braked));
      entry.cells.forEach((value, at) => {
        const cell = row.cells[at];
        const { text, warn, share } = typeof value === "object" ? value : { text: value };
        write(at || !entry.more ? cell : cell.firstChild, text);
        cell.classList.toggle("warn", Boolean(warn));
        cell.classList.toggle("full", share !== undefined);
        if (share !== undefined) cell.style.setProperty("--share", `${Math.min(100, share * 100)}%`);
      });
      row.more = entry.more;
      const place = after ? after.nextSibling : this.body.firstChild;
      if (place !== row) this.body.insertBefore(row, place);
      after = this.details(entry.key, row);
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.extra?.remove();
      row.remove();
      this.rows.delete(key);
      this.opened.delete(key);
    }
    this.none(!seen.size);
  }

  /* Updates the details below an opened row; returns the last of both elements. */
  details(key, row) {
    if (!this.opened.has(key)) {
      row.extra?.remove();
      row.extra = null;
      return row;
    }
    if (!row.extra) {
      row.extra = make("tr", undefined, "windows");
      row.extra.setAttribute("role", "row");
      const cell = make("td");
      cell.setAttribute("role", "cell");
      cell.colSpan = this.columns.length;
      cell.append(make("ul"));
      row.extra.append(cell);
    }
    const list = row.extra.firstChild.firstChild;
    row.more.forEach((text, at) => write(list.children[at] || list.appendChild(make("li")), text));
    while (list.children.length > row.more.length) list.lastChild.remove();
    if (row.nextSibling !== row.extra) row.after(row.extra);
    return row.extra;
  }

  none(isEmpty) {
    if (isEmpty && !this.nothing) {
      this.nothing = make("tr", undefined, "empty");
      this.nothing.setAttribute("role", "row");
      const cell = make("td", this.empty);
      cell.setAttribute("role", "cell");
      cell.colSpan = this.columns.length;
      this.nothing.append(cell);
      this.body.append(this.nothing);
    } else if (!isEmpty && this.nothing) {
      this.nothing.remove();
      this.nothing = null;
    }
  }
}

/* Names and figures; facts: [name, text, warn]. */
function tiles(id, facts) {
  const list = byId(id);
  facts.forEach(([name, text, warn], at) => {
    let tile = list.children[at];
    if (!tile) {
      tile = make("div");
      tile.append(make("dt"), make("dd"));
      list.append(tile);
    }
    write(tile.firstChild, name);
    write(tile.lastChild, text);
    tile.classList.toggle("warn", Boolean(warn));
  });
}

const tables = {
  paused: new Table("paused-table", ["Subject", "=Reason", "#For"], "Nothing is paused."),
  clients: new Table(
    "clients-table",
    ["Client", "=Protocol", "@User", "=Address", "#In flight to Kafka", "#Unanswered", "#Unacknowledged", "#Unwritten", "!Paused"],
    "No clients.",
  ),
  topics: new Table("topics-table", ["Topic", "#In flight to Kafka", "#Lag of the live reader"], "No topic is in use."),
  groups: new Table(
    "groups-table",
    ["Group", "Topic", "#Lag", "#Unsettled", "#Waiting for retry", "#Receivers here"],
    "No group is in use here.",
  ),
  spark: new Table(
    "spark-table",
    ["Job", "=Trigger", "#Records/s", "#Lag", "#Batch", "#Late", "#Dead letters", "#Rows of state", "#Last batch"],
    "The jobs have not been asked yet.",
  ),
  episodes: new Table("episodes-table", ["Subject", "=Reason", "=From", "=Until", "#Paused", "#Times"], "None."),
};

let held = false;
let source = null;
let latest = null;

function show({ flow, figures, ready, spark }) {
  const sum = (name, labels = {}) =>
    (figures[name] || [])
      .filter(([its]) => Object.entries(labels).every(([label, value]) => its[label] === value))
      .reduce((total, [, value]) => total + value, 0);
  const [process, outgoing, ...topics] = flow.budgets;
  const text = byId("filter").value;

  const missing = Object.entries(ready).filter(([name, good]) => name === "kafka" && !good).length;
  write(byId("version"), ready.version || "");
  const state = byId("state");
  write(state, missing ? "Kafka does not answer" : flow.paused.length ? `${flow.paused.length} paused` : "nothing paused");
  state.classList.toggle("bad", Boolean(missing || flow.paused.length));
  tiles("glance", [
    ["MQTT connections", number(sum("trivium_mqtt_connections"))],
    ["AMQP connections", number(sum("trivium_amqp_open_connections"))],
    ["HTTP connections", number(sum("trivium_http_connections"))],
    ["In flight to Kafka", `${bytes(process.bytes)} of ${bytes(process.bytes_limit)}`, !process.open],
    ["Records in flight", number(process.records)],
    ["In flight to clients", `${bytes(outgoing.bytes)} of ${bytes(outgoing.bytes_limit)}`, !outgoing.open],
    ["Event loop, worst delay", lasted(sum("trivium_event_loop_worst_lag_seconds")), sum("trivium_event_loop_worst_lag_seconds") > 0.25],
    ["As of", time(flow.at)],
  ]);

  tables.paused.show(
    flow.paused.slice(0, 100).map(({ subject, reason, since }) => ({
      key: `${subject}\n${reason}`,
      cells: [subject, reason, lasted(flow.at - since)],
      braked: true,
    })),
  );

  write(byId("clients-count"), `${number(flow.connections.length)} of ${number(flow.connections_total)}`);
  tables.clients.show(
    flow.connections.map((each) => {
      const unsettled = (toKafka) =>
        each.windows.filter((window) => window.to_kafka === toKafka).reduce((total, window) => total + window.unsettled, 0);
      const paused = each.paused.map(({ reason, since }) => `${reason}${since ? `, ${lasted(flow.at - since)}` : ""}`);
      const waits = each.windows.filter((window) => window.paused).map((window) => window.paused.reason);
      return {
        key: each.subject,
        braked: paused.length,
        cells: [
          each.client || "(no name)",
          each.protocol.toUpperCase(),
          each.principal,
          each.peer,
          { text: bytes(each.bytes), share: each.bytes_limit ? each.bytes / each.bytes_limit : undefined },
          number(unsettled(true)),
          number(unsettled(false)),
          { text: bytes(each.unwritten), warn: each.unwritten > 262144 },
          { text: paused.concat(waits.filter((reason, at) => waits.indexOf(reason) === at)).join("; "), warn: true },
        ],
        more: each.windows
          .map(
            (window) =>
              `${window.to_kafka ? "to" : "from"} Kafka: ${window.name}${window.topic ? ` (${window.topic})` : ""}: ` +
              `granted ${number(window.granted)}, unused credit ${number(window.outstanding)}, unsettled ${number(window.unsettled)}` +
              (window.paused ? `, paused: ${window.paused.reason}` : ""),
          )
          .concat(each.windows_total > each.windows.length ? [`and ${number(each.windows_total - each.windows.length)} more`] : []),
      };
    }),
  );

  const lag = new Map((figures.trivium_live_reader_lag || []).map(([labels, value]) => [labels.topic, value]));
  const inUse = new Map(topics.map((topic) => [topic.name.replace(/^topic /, ""), topic]));
  tables.topics.show(
    [...new Set([...inUse.keys(), ...lag.keys()])].map((name) => {
      const topic = inUse.get(name);
      return {
        key: name,
        braked: topic && !topic.open,
        cells: [
          name,
          topic ? { text: bytes(topic.bytes), share: topic.bytes / topic.bytes_limit } : "",
          lag.has(name) ? number(lag.get(name)) : "",
        ],
      };
    }),
  );

  tables.groups.show(
    (figures.trivium_kafka_group_lag || []).map(([{ group, topic }, value]) => ({
      key: `${group}\n${topic}`,
      cells: [
        group,
        topic,
        number(value),
        number(sum("trivium_kafka_group_unsettled", { group })),
        number(sum("trivium_kafka_group_waiting", { group })),
        number(sum("trivium_kafka_group_subscribers", { group })),
      ],
    })),
  );

  for (const id of ["spark", "spark-link"]) byId(id).hidden = !spark;
  const known = (value) => (value === null ? "" : number(value));
  tables.spark.show(
    (spark || []).flatMap(({ address, queries, error }) =>
      error
        ? [{ key: address, cells: [address, { text: error, warn: true }, "", "", "", "", "", "", ""], braked: !queries.length }]
        : queries.map((each) => ({
            key: `${address}\n${each.job}\n${each.query}`,
            cells: [
              each.query === each.job ? each.job : `${each.job}: ${each.query}`,
              each.trigger,
              number(Math.round(each.rows_per_second)),
              known(each.lag),
              each.batch_s === null ? "" : lasted(each.batch_s),
              known(each.late),
              { text: known(each.dead_letters), warn: each.dead_letters > 0 },
              known(each.state_rows),
              each.last_batch === null ? "" : `${lasted(flow.at - each.last_batch)} ago`,
            ],
          })),
    ),
  );

  tiles("sessions-list", [
    ["Connected here", number(sum("trivium_mqtt_sessions_connected"))],
    ["Stored, all gateways", number(sum("trivium_mqtt_sessions_stored"))],
    ["Subscriptions", number(sum("trivium_mqtt_subscriptions"))],
    ["Retained messages", number(sum("trivium_retained_messages"))],
    ["Takeovers", number(sum("trivium_mqtt_sessions_takeovers_total"))],
    ["Expired", number(sum("trivium_mqtt_sessions_expired_total"))],
    ["Wills published", number(sum("trivium_mqtt_sessions_wills_total"))],
  ]);
  const lost = (name, title) => [title, number(sum(name)), sum(name) > 0];
  tiles("letters-list", [
    ["AMQP, stored", number(sum("trivium_amqp_dead_letters_total"))],
    lost("trivium_amqp_dead_letters_failed_total", "AMQP, not stored"),
    ["MQTT, stored", number(sum("trivium_mqtt_messages_dead_letters_total"))],
    lost("trivium_mqtt_messages_refused_total", "MQTT, refused"),
    lost("trivium_mqtt_messages_lost_at_qos_0_total", "QoS 0, not stored"),
    lost("trivium_mqtt_messages_dropped_total", "QoS 0, reader too slow"),
    lost("trivium_http_produce_refused_total", "HTTP, 503"),
    lost("trivium_live_reader_gaps_total", "Deleted before delivery"),
  ]);

  write(byId("episodes-note"), text ? `only of clients whose name or address contains “${text}”` : "");
  tables.episodes.show(
    flow.episodes
      .filter(({ subject }) => !text || subject.includes(text))
      .map((each) => ({
        key: `${each.subject}\n${each.reason}\n${each.began}`,
        cells: [each.subject, each.reason, time(each.began), time(each.ended), lasted(each.paused_s), number(each.times)],
      })),
  );
}

function listen() {
  source?.close();
  source = new EventSource(`/console/events?client=${encodeURIComponent(byId("filter").value)}`);
  source.addEventListener("message", (event) => {
    latest = JSON.parse(event.data);
    if (!held) show(latest);
  });
  source.addEventListener("error", () => {
    write(byId("state"), "the gateway does not answer, trying again");
    byId("state").classList.add("bad");
  });
}

byId("hold").addEventListener("click", () => {
  held = !held;
  byId("hold").setAttribute("aria-pressed", String(held));
  write(byId("hold"), held ? "Resume" : "Hold");
  if (!held && latest) show(latest);
});
let typing = 0;
byId("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(listen, 300);
});
listen();
