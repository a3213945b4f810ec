// Runs the docs page's script on a contract (the argument is its file) with a minimal stand-in for a browser, and
// prints the number of operations, and of forms when all are open.
"use strict";

const fs = require("node:fs");
const contract = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
const counts = { operations: 0, forms: 0, tables: 0 };
const opened = [];

class Made {
  constructor(name) {
    this.name = name;
    this.childElementCount = name === "details" ? 1 : 0;
    this.dataset = {};
    if (name === "form") counts.forms += 1;
    if (name === "table") counts.tables += 1;
  }
  setAttribute(name, value) { if (name === "data-text") { this.dataset.text = value; counts.operations += 1; } }
  addEventListener(kind, act) { if (kind === "toggle") opened.push(act); }
  append() {}
  replaceChildren() {}
  querySelectorAll() { return []; }
}

const known = {};
global.document = {
  createElement: (name) => new Made(name),
  getElementById: (id) => (known[id] ||= new Made(id)),
};
global.fetch = async () => ({ json: async () => contract });

require(process.argv[2]);
setImmediate(() => setImmediate(() => {
  for (const act of opened) act();
  console.log(JSON.stringify({ ...counts, failure: known.operations.textContent || "" }));
}));
