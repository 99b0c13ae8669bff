// A conversation with a tool, by Anthropic's SDK for Node: whole and streamed. Prints what it saw.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const tools = [{ name: "get_weather", description: "The weather",
                 input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];

async function converse(ask) {
  const messages = [{ role: "user", content: "What is the weather?" }];
  const seen = { turns: [], inputs: [] };
  for (;;) {
    const message = await ask({ model: "scripted", max_tokens: 200, tools, messages,
                                thinking: { type: "enabled", budget_tokens: 1024 } });
    seen.turns.push(message.content.map((block) => block.type));
    messages.push({ role: "assistant", content: message.content });
    const uses = message.content.filter((block) => block.type === "tool_use");
    if (message.stop_reason !== "tool_use") {
      seen.text = message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
      seen.stop_reason = message.stop_reason;
      return seen;
    }
    seen.inputs.push(...uses.map((use) => use.input));
    messages.push({ role: "user", content: uses.map((use) => ({ type: "tool_result", tool_use_id: use.id,
                                                                content: "sunny" })) });
  }
}

const count = await client.messages.countTokens({ model: "scripted", messages: [{ role: "user", content: "go" }] });
let error;
try {
  await client.messages.create({ model: "another", max_tokens: 5, messages: [{ role: "user", content: "go" }] });
} catch (caught) {
  error = { name: caught.constructor.name, status: caught.status, type: caught.error?.error?.type,
            has_request_id: Boolean(caught.requestID) };
}
console.log(JSON.stringify({
  whole: await converse((body) => client.messages.create(body)),
  streamed: await converse((body) => client.messages.stream(body).finalMessage()),
  models: (await client.models.list()).data.map((card) => card.id),
  input_tokens: count.input_tokens,
  error,
}));
