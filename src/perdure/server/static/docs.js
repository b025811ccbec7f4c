// Shows /openapi.json. Text goes into the page as text only, never as markup.
"use strict";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const nameOf = (reference) => reference.split("/").pop();

// A short text for a schema: the name of what it refers to, or its type.
function typeOf(schema) {
  if (!schema || Object.keys(schema).length === 0) return "any JSON";
  if (schema.$ref) return nameOf(schema.$ref);
  const union = schema.anyOf || schema.oneOf;
  if (union) return union.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `[${typeOf(schema.items)}]`;
  return schema.format ? `${schema.type} (${schema.format})` : schema.type || "any JSON";
}

function table(headings, rows) {
  const head = element("tr", {}, ...headings.map((text) => element("th", {}, text)));
  const body = rows.map((row) =>
    element("tr", {}, ...row.map((cell) => element("td", {}, cell)))
  );
  return element("table", {}, head, ...body);
}

function parametersOf(operation) {
  const rows = (operation.parameters || []).map((parameter) => [
    element("code", {}, parameter.name),
    parameter.in + (parameter.required ? ", required" : ""),
    typeOf(parameter.schema),
    parameter.description || "",
  ]);
  return rows.length ? table(["parameter", "in", "type", "meaning"], rows) : null;
}

function bodyOf(operation) {
  const content = operation.requestBody && operation.requestBody.content;
  if (!content) return null;
  const [kind, { schema, example, examples }] = Object.entries(content)[0];
  const shown = example ?? (examples && Object.values(examples)[0].value);
  return element(
    "div", {},
    element("p", {}, `Body: ${typeOf(schema)} (${kind})`),
    shown === undefined ? null : element("pre", {}, JSON.stringify(shown, null, 2))
  );
}

function responsesOf(operation) {
  const rows = Object.entries(operation.responses).map(([status, response]) => [
    status,
    Object.entries(response.content || {})
      .map(([kind, { schema }]) => `${typeOf(schema)} (${kind})`)
      .join(", "),
    response.description || "",
  ]);
  return table(["status", "body", "meaning"], rows);
}

function operationOf(path, method, operation) {
  return element(
    "details", { id: operation.operationId, "data-text": `${method} ${path} ${operation.summary}` },
    element(
      "summary", {},
      element("span", { class: "method" }, method.toUpperCase()),
      element("code", {}, path),
      ` ${operation.summary || ""}`
    ),
    element("p", {}, operation.description || ""),
    parametersOf(operation), bodyOf(operation), responsesOf(operation)
  );
}

function schemaOf(name, schema) {
  return element(
    "details", { id: `schema-${name}`, "data-text": name },
    element("summary", {}, element("code", {}, name)),
    element("pre", {}, JSON.stringify(schema, null, 2))
  );
}

function show(api) {
  const groups = new Map();
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = (operation.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationOf(path, method, operation));
    }
  }
  const schemas = Object.entries(api.components.schemas).map(([name, schema]) => schemaOf(name, schema));
  const parts = [...groups, ["schemas", schemas]].map(([tag, found]) =>
    element("section", {}, element("h2", {}, tag), ...found)
  );
  document.getElementById("operations").replaceChildren(...parts);
}

function filter(text) {
  const wanted = text.toLowerCase();
  for (const found of document.querySelectorAll("details"))
    found.hidden = !found.dataset.text.toLowerCase().includes(wanted);
}

document.getElementById("filter").addEventListener("input", (event) => filter(event.target.value));
fetch("/openapi.json")
  .then((response) => response.json())
  .then(show)
  .catch((error) => document.getElementById("operations").replaceChildren(`It cannot be shown: ${error}`));
