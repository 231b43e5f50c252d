// LangChain for JavaScript over OpenAI's API: invoke, stream, structured output, tools.
// /// script
// dependencies = ["@langchain/openai@1.5.8", "@langchain/core@1.4.0", "zod@4.6.7"]
// ///
import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const model = new ChatOpenAI({
  model: "pocket",
  apiKey: "none",
  temperature: 0,
  maxTokens: 200,
  maxRetries: 0,
  configuration: { baseURL: process.env.RUNTIME_URL + "/v1" },
});
assert.equal((await model.invoke("Count from 1 to 5.")).content, "1, 2, 3, 4, 5");
let text = "";
for await (const chunk of await model.stream("Count from 1 to 5.")) text += chunk.content;
assert.equal(text, "1, 2, 3, 4, 5");
const Review = z.object({ stars: z.number().int() });
const typed = await model.withStructuredOutput(Review, { name: "review", method: "jsonSchema" }).invoke("A review.");
assert.ok(Number.isInteger(typed.stars));
const weather = tool(async () => "21 degrees", {
  name: "get_weather",
  description: "The weather in a city.",
  schema: z.object({ city: z.string() }),
});
const called = await model.bindTools([weather]).invoke("What is the weather in Oslo?");
assert.equal(called.tool_calls[0].name, "get_weather");
console.log("ok: invoke, stream, withStructuredOutput, bindTools");
