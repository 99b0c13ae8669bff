// Conversations with a tool, by OpenAI's SDK for Node: responses and chats, whole and streamed. Prints what it saw.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"],
                     additionalProperties: false };

async function respond(ask, keepsState) {
  const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
  let input = [{ role: "user", content: "What is the weather?" }];
  let previous_response_id;
  const seen = { turns: [], inputs: [] };
  for (;;) {
    const response = await ask({ model: "scripted", input, tools, previous_response_id });
    seen.turns.push(response.output.map((item) => item.type));
    const made = response.output.filter((item) => item.type === "function_call");
    if (made.length === 0) return { ...seen, text: response.output_text, status: response.status };
    seen.inputs.push(...made.map((call) => JSON.parse(call.arguments)));
    const outputs = made.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "sunny" }));
    if (keepsState) previous_response_id = response.id;
    input = keepsState ? outputs : [...input, ...response.output, ...outputs];
  }
}

async function chat(run) {
  const inputs = [];
  const tools = [{ type: "function", function: { name: "get_weather", description: "The weather", parameters,
                                                 parse: JSON.parse, function: (input) => { inputs.push(input); return "sunny"; } } }];
  const runner = run({ model: "scripted", tools, messages: [{ role: "user", content: "What is the weather?" }] });
  return { text: await runner.finalContent(), inputs };
}

const stream = (body) => client.responses.stream(body).finalResponse();
console.log(JSON.stringify({
  responses: await respond((body) => client.responses.create(body), false),
  responses_with_state: await respond((body) => client.responses.create(body), true),
  responses_streamed: await respond(stream, false),
  chat: await chat((body) => client.chat.completions.runTools(body)),
  chat_streamed: await chat((body) => client.chat.completions.runTools({ ...body, stream: true })),
}));
