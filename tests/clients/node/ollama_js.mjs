// Ollama's client for JavaScript: list, chat, stream, format.
// /// script
// dependencies = ["ollama@0.6.4"]
// ///
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.RUNTIME_URL });
const count = {
  model: "pocket",
  messages: [{ role: "user", content: "Count from 1 to 5." }],
  options: { temperature: 0 },
  think: false,
};
assert.equal((await client.list()).models[0].name, "pocket");
assert.equal((await client.chat(count)).message.content, "1, 2, 3, 4, 5");
let text = "";
for await (const part of await client.chat({ ...count, stream: true })) text += part.message.content;
assert.equal(text, "1, 2, 3, 4, 5");
const format = { type: "object", properties: { stars: { type: "integer" } }, required: ["stars"] };
assert.ok("stars" in JSON.parse((await client.chat({ ...count, format })).message.content));
console.log("ok: list, chat, stream, format");
