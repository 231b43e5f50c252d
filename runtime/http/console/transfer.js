// Conversations as a file. What comes from one is checked: each field has its type, or is left out.

import { newId } from "./conversation.js";

const FORMAT = "runtime-console-conversations";
const ROLES = ["user", "assistant", "tool"];
const ID = /^[a-z0-9]{1,40}$/;
const DAMAGED = "A conversation of this file is damaged; nothing was imported.";

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** The conversations of an exported file, each with a new id. Throws Error for another file. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON; choose one that was exported here.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file holds no conversations of this console; choose one that was exported here.");
  }
  return file.conversations.map(conversation);
}

function conversation(given) {
  const nodes = Object.fromEntries(
    Object.entries(given?.nodes ?? {}).map(([id, node]) => [id, checked(id, node)]),
  );
  for (const node of Object.values(nodes)) checkWay(nodes, node);
  return {
    id: newId(),
    title: text(given.title),
    created: number(given.created) ?? Date.now(),
    updated: number(given.updated) ?? Date.now(),
    settings: Object.fromEntries(
      Object.entries(given.settings ?? {}).filter(([, value]) => typeof value === "string"),
    ),
    nodes,
    leaf: Object.hasOwn(nodes, given.leaf) ? given.leaf : (Object.keys(nodes).at(-1) ?? null),
  };
}

function checked(id, node) {
  const isWhole =
    ID.test(id) && node?.id === id && ROLES.includes(node.role) && typeof node.content === "string";
  if (!isWhole) throw new Error(DAMAGED);
  const { stats } = node;
  return {
    id,
    parent: node.parent ?? null,
    order: number(node.order) ?? 0,
    role: node.role,
    content: node.content,
    reasoning: text(node.reasoning),
    reasoningS: number(node.reasoningS),
    calls: calls(node.calls),
    callId: text(node.callId),
    name: text(node.name),
    model: text(node.model),
    finish: text(node.finish),
    error: node.error ? { message: text(node.error.message), status: number(node.error.status) } : null,
    stats:
      number(stats?.ttftS) === null || number(stats?.tokens) === null
        ? null
        : { ttftS: stats.ttftS, tokens: stats.tokens, perS: number(stats.perS), cached: number(stats.cached) },
  };
}

/** Throws Error unless a message has a way back to the root, without circles. */
function checkWay(nodes, node) {
  const seen = new Set();
  for (let id = node.id; id !== null; id = nodes[id].parent) {
    if (seen.has(id) || !Object.hasOwn(nodes, id)) throw new Error(DAMAGED);
    seen.add(id);
  }
}

function calls(given) {
  return (Array.isArray(given) ? given : []).map((call) => ({
    id: text(call?.id),
    name: text(call?.name),
    args: text(call?.args),
  }));
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);
