// Shows the contract and lets users try its operations. Loads nothing from other servers.
"use strict";

const METHODS = ["get", "post", "put", "patch", "delete", "head", "options"];
const LONGEST_ANSWER = 20000;
let contract = {};

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function resolved(node) {
  if (!node || !node.$ref) return node;
  let target = contract;
  for (const step of node.$ref.slice(2).split("/")) target = target[step.replaceAll("~1", "/").replaceAll("~0", "~")];
  return resolved(target);
}

function shortType(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.type === "array") return `list of ${shortType(schema.items) || "anything"}`;
  const type = Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "anything";
  const bounds = ["minimum", "maximum", "minLength", "maxLength", "default"].filter((name) => name in schema);
  return bounds.length ? `${type} (${bounds.map((name) => `${name} ${schema[name]}`).join(", ")})` : type;
}

// Returns a sample value from a schema's example, default or type.
function example(schema, depth = 0) {
  schema = resolved(schema) || {};
  if (schema.examples && schema.examples.length) return schema.examples[0];
  if ("example" in schema) return schema.example;
  if ("default" in schema) return schema.default;
  if (schema.enum) return schema.enum[0];
  for (const choice of ["oneOf", "anyOf"]) if (schema[choice] && !schema.properties) return example(schema[choice][0], depth);
  const type = Array.isArray(schema.type) ? schema.type[0] : schema.type;
  if (type === "array") return depth > 4 ? [] : [example(schema.items, depth + 1)];
  if (type === "object" || schema.properties) {
    const wanted = schema.required && schema.required.length ? schema.required : Object.keys(schema.properties || {});
    return Object.fromEntries(wanted.map((name) => [name, example((schema.properties || {})[name], depth + 1)]));
  }
  if (type === "integer" || type === "number") return schema.minimum || 0;
  if (type === "boolean") return false;
  return type === "null" ? null : "text";
}

function described(text) {
  return text ? element("p", { class: "description" }, text) : null;
}

function parameterTable(parameters) {
  if (!parameters.length) return null;
  const rows = parameters.map((one) =>
    element("tr", {},
      element("td", {}, element("code", {}, one.name)),
      element("td", {}, one.in + (one.required ? ", needed" : "")),
      element("td", {}, shortType(one.schema)),
      element("td", {}, one.description || "")));
  return element("table", {}, element("tbody", {}, ...rows));
}

function answerTable(responses) {
  const rows = Object.entries(responses).map(([status, reference]) => {
    const answer = resolved(reference);
    const types = Object.entries(answer.content || {}).map(([media, content]) => `${media}: ${shortType(content.schema)}`);
    return element("tr", {},
      element("td", {}, element("code", {}, status)),
      element("td", {}, answer.description || ""),
      element("td", {}, types.join("; ")));
  });
  return element("table", {}, element("tbody", {}, ...rows));
}

async function send(method, path, parameters, form, output) {
  const query = new URLSearchParams();
  const headers = {};
  for (const parameter of parameters) {
    const value = form.elements[`${parameter.in}:${parameter.name}`].value;
    if (value === "") continue;
    if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (parameter.in === "query") query.append(parameter.name, value);
    else if (parameter.in === "header") headers[parameter.name] = value;
  }
  const options = { method: method.toUpperCase(), headers };
  if (form.elements.media && form.elements.body.value !== "") {
    headers["Content-Type"] = form.elements.media.value;
    options.body = form.elements.body.value;
  }
  const address = `.${path}${query.size ? `?${query}` : ""}`;
  output.textContent = `${options.method} ${address} ...`;
  try {
    const answer = await fetch(address, options);
    const fields = [...answer.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
    const reader = answer.body ? answer.body.getReader() : null;
    const decoder = new TextDecoder();
    let text = "";
    for (;;) { // an answer may be endless: it is shown as it arrives, up to a length
      const part = reader ? await reader.read() : { done: true };
      if (!part.done) text += decoder.decode(part.value, { stream: true });
      output.textContent = `${answer.status} ${answer.statusText}\n${fields}\n\n${text}`;
      if (part.done) break;
      if (text.length > LONGEST_ANSWER) { await reader.cancel(); output.textContent += "\n(cut off)"; break; }
    }
  } catch (error) {
    output.textContent = `No answer: ${error}`;
  }
}

function tryOut(method, path, parameters, body) {
  const output = element("pre", { "aria-live": "polite" });
  const form = element("form", { onsubmit: (event) => {
    event.preventDefault();
    send(method, path, parameters, form, output);
  } });
  for (const parameter of parameters) {
    form.append(element("label", {}, `${parameter.name} (${parameter.in})`,
      element("input", { name: `${parameter.in}:${parameter.name}`, placeholder: shortType(parameter.schema) })));
  }
  if (body) {
    const types = Object.keys(body.content);
    const text = element("textarea", { name: "body", spellcheck: "false" });
    const fill = (media) => {
      const schema = body.content[media].schema;
      text.value = schema ? JSON.stringify(example(schema), null, 2) : "";
    };
    const media = element("select", { name: "media", onchange: () => fill(media.value) },
      ...types.map((type) => element("option", {}, type)));
    fill(types[0]);
    form.append(element("label", {}, "Content-Type", media), element("label", {}, "Body", text));
  }
  form.append(element("button", {}, "Send"), output);
  return form;
}

function operationView(method, path, shared, operation) {
  const parameters = [...shared, ...(operation.parameters || [])].map(resolved);
  const body = resolved(operation.requestBody);
  const view = element("details", { "data-text": `${method} ${path} ${operation.summary} ${operation.operationId}`.toLowerCase() },
    element("summary", {}, element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path), " ",
      element("span", { class: "about" }, operation.summary || "")));
  view.addEventListener("toggle", () => {
    if (view.childElementCount > 1) return; // already built when it was first opened
    view.append(...[
      described(operation.description),
      parameterTable(parameters),
      body ? element("p", {}, "Body: ", Object.entries(body.content)
        .map(([media, content]) => `${media}: ${shortType(content.schema) || "anything"}`).join("; ")) : null,
      answerTable(operation.responses),
      tryOut(method, path, parameters, body),
    ].filter((part) => part !== null));
  });
  return view;
}

function show() {
  document.getElementById("title").textContent = `${contract.info.title} ${contract.info.version}`;
  document.getElementById("summary").textContent = contract.info.summary || "";
  const main = document.getElementById("operations");
  main.replaceChildren(element("p", { class: "description" }, contract.info.description || ""));
  for (const tag of contract.tags) {
    const views = [];
    for (const [path, item] of Object.entries(contract.paths)) {
      for (const method of METHODS) {
        const operation = item[method];
        if (operation && operation.tags.includes(tag.name)) {
          views.push(operationView(method, path, item.parameters || [], operation));
        }
      }
    }
    main.append(element("section", {}, element("h2", {}, tag.name), described(tag.description), ...views));
  }
  const schemas = document.getElementById("schemas");
  for (const [name, schema] of Object.entries(contract.components.schemas)) {
    schemas.append(element("details", {}, element("summary", {}, element("code", {}, name)),
      element("pre", {}, JSON.stringify(schema, null, 2))));
  }
  document.getElementById("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const view of main.querySelectorAll("details")) view.hidden = !view.dataset.text.includes(wanted);
  });
}

fetch("openapi", { headers: { Accept: "application/json" } })
  .then((answer) => answer.json())
  .then((document_) => { contract = document_; show(); })
  .catch((error) => { document.getElementById("operations").textContent = `The contract cannot be read: ${error}`; });
