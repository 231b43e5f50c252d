// A conversation is a tree of messages: an edit or a new answer is a sibling of what was there before, so
// nothing is lost. What is shown is the path from the root to `leaf`.

export const newId = () =>
  crypto.getRandomValues(new Uint32Array(3)).reduce((text, n) => text + n.toString(36), "");

export function create(settings) {
  return {
    id: newId(),
    title: "",
    created: Date.now(),
    updated: Date.now(),
    settings: { ...settings },
    nodes: {},
    leaf: null,
  };
}

/** Adds a message behind `parent` (null: at the beginning) and shows it. -> the message */
export function append(conversation, parent, fields) {
  const node = { id: newId(), parent, order: Object.keys(conversation.nodes).length, content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

/** The messages that are shown, first to last. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) found.push(node);
  return found.reverse();
}

/** The versions of a message, oldest first. */
export function siblings(conversation, node) {
  return children(conversation, node.parent).filter((one) => one.role === node.role);
}

function children(conversation, id) {
  return Object.values(conversation.nodes)
    .filter((one) => one.parent === id)
    .sort((a, b) => a.order - b.order);
}

/** Shows another version of a message, and what came last behind it. */
export function select(conversation, id) {
  for (let last = id; last !== undefined; last = children(conversation, last).at(-1)?.id)
    conversation.leaf = last;
}

/** Deletes a message and all behind it. */
export function remove(conversation, id) {
  const node = conversation.nodes[id];
  const doomed = [id];
  for (const each of doomed) doomed.push(...children(conversation, each).map((one) => one.id));
  for (const each of doomed) delete conversation.nodes[each];
  const left = siblings(conversation, node).at(-1);
  if (left) select(conversation, left.id);
  else conversation.leaf = node.parent;
}

/** The tool calls of the last message that have no result yet. */
export function openCalls(conversation) {
  const shown = path(conversation);
  const caller = shown.findLast((node) => node.role !== "tool");
  if (caller?.role !== "assistant" || !caller.calls?.length) return [];
  const answered = new Set(shown.slice(shown.indexOf(caller)).map((node) => node.callId));
  return caller.calls.filter((call) => !answered.has(call.id));
}

/** The messages as /v1/chat/completions takes them. */
export function messages(conversation, leaf = conversation.leaf) {
  const system = conversation.settings.system?.trim();
  const shown = path(conversation, leaf).filter((node) => !node.error || node.content || node.calls?.length);
  return [...(system ? [{ role: "system", content: system }] : []), ...shown.map(message)];
}

function message(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "user") return { role: "user", content: node.content };
  const calls = (node.calls ?? []).map(({ id, name, args }) => ({
    id,
    type: "function",
    function: { name, arguments: args || "{}" },
  }));
  return {
    role: "assistant",
    content: node.content || (calls.length ? null : ""),
    ...(node.reasoning ? { reasoning_content: node.reasoning } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > 60 ? line.slice(0, 58).trimEnd() + "…" : line;
}
