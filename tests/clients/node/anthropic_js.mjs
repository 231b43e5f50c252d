// Anthropic's client for JavaScript: messages, its stream helper, counted tokens.
// /// script
// dependencies = ["@anthropic-ai/sdk@1.12.0"]
// ///
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.RUNTIME_URL, apiKey: "none", maxRetries: 0 });
const count = { model: "pocket", max_tokens: 100, messages: [{ role: "user", content: "Count from 1 to 5." }] };

assert.equal((await client.messages.create(count)).stop_reason, "end_turn");
let text = "";
const stream = client.messages.stream(count).on("text", (part) => (text += part));
assert.equal((await stream.finalMessage()).content[0].text, text);
console.log("ok: messages, stream helper");

const tools = [
  {
    name: "get_weather",
    description: "The weather in a city.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const called = await client.messages.create({ ...count, tools, tool_choice: { type: "tool", name: "get_weather" } });
assert.equal(called.stop_reason, "tool_use");
assert.ok((await client.messages.countTokens({ model: "pocket", messages: count.messages, tools })).input_tokens > 0);
console.log("ok: tools, countTokens");
