// The AI SDK over OpenAI's chats and responses, an OpenAI-compatible provider, and Anthropic's messages.
// /// script
// dependencies = [
//   "ai@6.0.326",
//   "@ai-sdk/openai@3.0.141",
//   "@ai-sdk/openai-compatible@2.0.91",
//   "@ai-sdk/anthropic@3.0.139",
//   "zod@4.6.7",
// ]
// ///
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = process.env.RUNTIME_URL + "/v1";
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  "openai chat": openai.chat("pocket"),
  "openai responses": openai.responses("pocket"),
  "openai-compatible": createOpenAICompatible({ name: "runtime", baseURL, supportsStructuredOutputs: true })("pocket"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("pocket"),
};
const limits = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
for (const [name, model] of Object.entries(models)) {
  const count = { model, prompt: "Count from 1 to 5.", ...limits };
  assert.equal((await generateText(count)).text, "1, 2, 3, 4, 5");
  assert.equal(await streamText(count).text, "1, 2, 3, 4, 5");
  const schema = z.object({ stars: z.number().int() });
  const typed = await generateText({ ...count, output: Output.object({ schema }) });
  assert.ok(Number.isInteger(typed.output.stars));
  const asked = [];
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (asked.push(city), "21 degrees, clear"),
  });
  await generateText({
    ...count,
    prompt: "What is the weather in Oslo?",
    tools: { get_weather: weather },
    stopWhen: stepCountIs(3),
  });
  assert.deepEqual(asked, ["Oslo"]);
  console.log(`ok: ${name}: generateText, streamText, Output.object, tools`);
}
