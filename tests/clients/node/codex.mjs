// Codex, the command line tool, over responses: a question, and a turn in which a tool is called and its result
// answered. The embedded model gets the name of the tool wrong, so the result is the client's own error.
// /// script
// dependencies = ["@openai/codex@0.169.0"]
// server = "agents"
// ///
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";

mkdirSync(".codex");
const server = `
import { createInterface } from "node:readline";
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather in a city.", inputSchema: schema }];
const answers = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "weather", version: "1" },
  }),
  "tools/list": () => ({ tools }),
  "tools/call": () => ({ content: [{ type: "text", text: "21 degrees, clear" }] }),
};
for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const rest = answers[method] ? { result: answers[method](params) } : { error: { code: -32601, message: method } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...rest }));
}
`;
writeFileSync("weather.mjs", server);
writeFileSync(
  ".codex/config.toml",
  `model = "pocket"
model_provider = "runtime"
model_context_window = 65536

[model_providers.runtime]
name = "runtime"
base_url = "${process.env.RUNTIME_URL}/v1"
wire_api = "responses"

[mcp_servers.weather]
command = "node"
args = ["${process.cwd()}/weather.mjs"]
`,
);
const codex = (question) =>
  execFileSync(
    `${import.meta.dirname}/node_modules/.bin/codex`,
    ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", question],
    { env: { ...process.env, CODEX_HOME: ".codex" }, stdio: ["ignore", "pipe", "ignore"], timeout: 120_000 },
  )
    .toString()
    .trim()
    .split("\n")
    .map((line) => JSON.parse(line));
const text = (events) => events.filter((event) => event.item?.type === "agent_message").at(-1)?.item.text;

assert.equal(text(codex("Count from 1 to 5.")), "1, 2, 3, 4, 5");
console.log("ok: exec");
const events = codex("What is the weather in Oslo?");
assert.ok(text(events));
assert.equal(events.at(-1).type, "turn.completed");
console.log("ok: tools in namespaces, a call, its result");
