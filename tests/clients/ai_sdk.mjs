// Conversations with a tool, by the Vercel AI SDK over each dialect, whole and streamed. Prints what it saw.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2] + "/v1";
const models = {
  responses: createOpenAI({ baseURL, apiKey: "none" }).responses("scripted"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("scripted"),
  chat: createOpenAICompatible({ name: "fathom", baseURL, apiKey: "none" })("scripted"),
};

const seen = {};
for (const [dialect, model] of Object.entries(models)) {
  const inputs = [];
  const request = {
    model, prompt: "What is the weather?", stopWhen: stepCountIs(5), maxRetries: 0, maxOutputTokens: 200,
    tools: { get_weather: tool({ description: "The weather", inputSchema: z.object({ city: z.string() }),
                                 execute: async (input) => { inputs.push(input); return "sunny"; } }) },
    providerOptions: { openai: { reasoningSummary: "auto", forceReasoning: true } },
  };
  const whole = await generateText(request);
  const parts = [];
  const streamed = streamText({ ...request, onError: ({ error }) => { throw error; } });
  for await (const part of streamed.fullStream) if (parts.at(-1) !== part.type) parts.push(part.type);
  seen[dialect] = { text: whole.text, reasoning: whole.steps.map((step) => step.reasoningText ?? ""),
                    steps: whole.steps.length, finish: whole.finishReason, inputs, parts,
                    streamed_text: await streamed.text, tokens: whole.totalUsage.totalTokens };
}
console.log(JSON.stringify(seen));
