// Claude Code, the command line tool: a question, and a turn in which a tool is called and its result answered.
// The embedded model gets the name of the tool wrong, so the result is the client's own error.
// /// script
// dependencies = ["@anthropic-ai/claude-code@2.1.197"]
// server = "agents"
// ///
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";

const here = import.meta.dirname;
const env = {
  ...process.env,
  ANTHROPIC_BASE_URL: process.env.RUNTIME_URL,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: "pocket",
  ANTHROPIC_SMALL_FAST_MODEL: "pocket",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};
const claude = (...args) =>
  JSON.parse(
    execFileSync(`${here}/node_modules/.bin/claude`, ["--output-format", "json", ...args], {
      env,
      stdio: ["ignore", "pipe", "inherit"],
      timeout: 120_000,
    }),
  );

const count = claude("-p", "Count from 1 to 5.");
assert.equal(count.result, "1, 2, 3, 4, 5");
assert.ok(count.usage.output_tokens > 0);
console.log("ok: -p");

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
writeFileSync("mcp.json", JSON.stringify({ mcpServers: { weather: { command: "node", args: ["weather.mjs"] } } }));
const weather = claude("-p", "What is the weather in Oslo?", "--strict-mcp-config", "--mcp-config", "mcp.json");
assert.ok(weather.num_turns >= 2);
assert.ok(weather.result && !weather.is_error);
console.log("ok: tools of an MCP server, a call, its result");
