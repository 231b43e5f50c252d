// OpenAI's Agents SDK for JavaScript over responses and over chats: an agent with a tool.
// /// script
// dependencies = ["@openai/agents@0.20.0", "openai@6.49.0", "zod@4.6.7"]
// ///
import assert from "node:assert/strict";
import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setTracingDisabled(true);
for (const useResponses of [true, false]) {
  const modelProvider = new OpenAIProvider({ baseURL: process.env.RUNTIME_URL + "/v1", apiKey: "none", useResponses });
  const runner = new Runner({ modelProvider, model: "pocket", modelSettings: { temperature: 0, maxTokens: 200 } });
  const asked = [];
  const weather = tool({
    name: "get_weather",
    description: "The weather in a city.",
    parameters: z.object({ city: z.string() }),
    execute: async ({ city }) => (asked.push(city), "21 degrees, clear"),
  });
  const plain = await runner.run(new Agent({ name: "plain" }), "Count from 1 to 5.");
  assert.equal(plain.finalOutput, "1, 2, 3, 4, 5");
  const result = await runner.run(new Agent({ name: "helper", tools: [weather] }), "What is the weather in Oslo?");
  assert.ok(result.finalOutput && asked.length);
  console.log(`ok: ${useResponses ? "responses" : "chat"}: run, tool`);
}
