"""Conformance case 107 and the rest of the Responses API, asked by the official client wherever it can say it."""

import json
import re
import signal

import openai
import pytest

from dsml import ASSISTANT, BOS, EOS, USER, call, calls
from http_client import HttpClient
from scripted_server import ScriptedServer

BODY = {"model": "scripted", "input": "go"}
THINK = {"reasoning": {"effort": "high"}}
WEATHER = {"type": "function", "name": "get_weather", "description": "The weather", "strict": False,
           "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
ANSWER = "I must look.</think>Let me see." + calls(call("get_weather", city="Paris", days=2))


@pytest.fixture
def respond(scripted, scripted_openai):
    """Says a text and gives the client's response to these fields."""
    def ask(said="Hello there.", /, **fields):
        scripted.say(said)
        return scripted_openai.responses.create(**{**BODY, **fields})
    return ask


@pytest.fixture
def prompt_is(scripted, scripted_openai):
    """Is this the prompt that these fields make?"""
    def check(expected, **fields):
        scripted.rules([{"say": "another prompt"}, {"when": expected, "say": "this prompt"}])
        return "this prompt" in scripted_openai.responses.create(**{**BODY, **fields}).model_dump_json()
    return check


@pytest.fixture
def refused(respond):
    def check(param, **fields):
        with pytest.raises(openai.BadRequestError) as bad:
            respond(**fields)
        assert bad.value.param == param
        return bad.value.message
    return check


def shape_of(events):
    """The types in order; deltas of one kind are one."""
    shape = []
    for event in events:
        step = event.type.removeprefix("response.")
        if not (shape and shape[-1] == step and step.endswith(".delta")):
            shape.append(step)
    return shape


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done"]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
REASONING = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
             "content_part.done", "output_item.done"]
SUMMARY = ["output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
           "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"]


def test_c107_a_previous_response_that_is_not_known_is_400(respond):
    with pytest.raises(openai.BadRequestError) as missing:
        respond(previous_response_id="resp_0")
    assert missing.value.code == "previous_response_not_found" and "replay full input instead" in missing.value.message
    with pytest.raises(openai.BadRequestError) as missing:
        respond(conversation="conv_1")
    assert "replay full input instead" in missing.value.message


def output_of(response, text="sunny"):
    made = next(item for item in response.output if item.type == "function_call")
    return {"type": "function_call_output", "call_id": made.call_id, "output": text}


SAMPLED = f"{USER}go{ASSISTANT}<think>{ANSWER}{EOS}{USER}<tool_result>sunny</tool_result>{ASSISTANT}<think>"


def test_c107_a_call_that_is_replayed_goes_on_where_the_model_stood(respond, prompt_is):
    body = {"tools": [WEATHER], **THINK}
    first = respond(ANSWER, **body)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    made = first.output[2]
    assert made.name == "get_weather" and json.loads(made.arguments) == {"city": "Paris", "days": 2}
    items = [item.model_dump(exclude_none=True) for item in first.output]
    start, result = {"role": "user", "content": "go"}, output_of(first)
    assert prompt_is(SAMPLED, input=[start, *items, result], **body)
    assert prompt_is(SAMPLED, input=[start, *items[1:], result], **body)  # without the reasoning
    without_ids = [{key: value for key, value in item.items() if key != "id"} for item in items]
    assert prompt_is(SAMPLED, input=[start, *without_ids, result], **body)
    parts = {**result, "output": [{"type": "input_text", "text": "sunny"}]}
    assert prompt_is(SAMPLED, input=[start, *items, parts], **body)


def test_c107_an_output_without_its_call_is_400(refused):
    result = {"type": "function_call_output", "call_id": "call_x", "output": "sunny"}
    assert "replay full input" in refused("input", input=[{"role": "user", "content": "go"}, result])


@pytest.mark.parametrize("text, fields, shape", [
    ("Hello there.", {}, TEXT),
    (ANSWER, {"tools": [WEATHER], **THINK}, REASONING + TEXT + CALL),
    (ANSWER, {"tools": [WEATHER], "reasoning": {"effort": "high", "summary": "auto"}}, SUMMARY + TEXT + CALL),
    ("Hm.</think>" + calls(call("get_weather", city="Rome"), call("get_weather", city="Bonn")),
     {"tools": [WEATHER], **THINK}, REASONING + CALL + CALL)])
def test_c107_the_order_of_events(scripted, scripted_openai, text, fields, shape):
    scripted.say(text)
    events = list(scripted_openai.responses.create(**BODY, **fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert shape_of(events) == ["created", "in_progress", *shape, "completed"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    final = events[-1].response
    assert final.status == "completed" and final.usage.output_tokens > 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(done)))
    assert [event.item.id for event in added] == [item.id for item in done] and len({item.id for item in done}) == len(done)
    for index, item in enumerate(done):
        own = [event for event in events if getattr(event, "item_id", None) == item.id]
        assert own and {event.output_index for event in own} == {index}
        joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
        if item.type == "function_call":
            assert joined == item.arguments
        else:
            assert joined == ((item.summary or item.content) if item.type == "reasoning" else item.content)[0].text


@pytest.mark.parametrize("text, fields", [("Hello there.", {}), ("", {}), (ANSWER, {"tools": [WEATHER], **THINK})])
def test_the_stream_adds_up_to_the_whole_response(scripted, scripted_openai, text, fields):
    scripted.say(text)
    whole = scripted_openai.responses.create(**BODY, **fields)
    with scripted_openai.responses.stream(**BODY, **fields) as stream:
        streamed = stream.get_final_response()

    def comparable(response):
        text = response.model_dump_json(exclude={"id", "created_at"}, exclude_none=True)
        text = re.sub(r',?"(parsed|parsed_arguments)":(null|\{.*?\})', "", text)
        return re.sub(r"\b(rs|msg|fc|call)_[0-9a-f]+", "ID", text)

    assert comparable(streamed) == comparable(whole)


def test_the_response_repeats_its_request(respond):
    response = respond(instructions="Be brief.", max_output_tokens=50, temperature=0.5, top_p=0.9, metadata={"a": "b"},
                       tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False, **THINK)
    assert response.object == "response" and response.status == "completed" and response.error is None
    assert response.instructions == "Be brief." and response.max_output_tokens == 50 and response.metadata == {"a": "b"}
    assert (response.temperature, response.top_p, response.parallel_tool_calls) == (0.5, 0.9, False)
    assert response.tools[0].name == "get_weather" and response.reasoning.effort == "high"
    assert response.text.format.type == "text" and response.truncation == "disabled"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.input_tokens_details.cached_tokens >= 0


def test_instructions_and_roles(prompt_is):
    assert prompt_is(f"{BOS}Be brief.{USER}go{ASSISTANT}</think>", instructions="Be brief.")
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
             {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
              "content": [{"type": "output_text", "text": "b", "annotations": []}]},
             {"role": "user", "content": "c"}]
    assert prompt_is(f"{BOS}Be brief.\n\nBe kind.{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}</think>",
                     instructions="Be brief.", input=items)


def test_effort_turns_thinking_on(prompt_is, respond):
    assert prompt_is(f"{ASSISTANT}<think>", **THINK)
    assert prompt_is(f"{ASSISTANT}</think>") and prompt_is(f"{ASSISTANT}</think>", reasoning={"effort": "none"})
    thought = respond("Deep.</think>Hello", **THINK)
    assert thought.output[0].content[0].text == "Deep." and thought.output_text == "Hello"
    assert thought.usage.output_tokens_details.reasoning_tokens > 0


def test_a_previous_response_is_gone_on_with(respond, prompt_is):
    body = {"tools": [WEATHER], **THINK}
    first = respond(ANSWER, instructions="Be brief.", **body)
    assert prompt_is(SAMPLED, previous_response_id=first.id, input=[output_of(first)], **body)
    # Instructions are not carried over; a third turn reaches back to the first.
    second = respond("Done.</think>It is sunny.", previous_response_id=first.id, input=[output_of(first)], **body)
    assert second.previous_response_id == first.id
    assert prompt_is(f"{SAMPLED}Done.</think>It is sunny.{EOS}{USER}thanks{ASSISTANT}<think>",
                     previous_response_id=second.id, input="thanks", **body)


def test_items_are_known_by_reference(respond, prompt_is):
    body = {"tools": [WEATHER], **THINK}
    first = respond(ANSWER, **body)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    start = {"role": "user", "content": "go"}
    assert prompt_is(SAMPLED, input=[start, *references, output_of(first)], **body)


def test_responses_can_be_fetched_and_deleted(respond, scripted_openai):
    first = respond()
    assert scripted_openai.responses.retrieve(first.id).output_text == "Hello there."
    scripted_openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        scripted_openai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        respond(previous_response_id=first.id)


def test_what_is_not_stored_cannot_be_gone_on_with(respond, scripted_openai):
    first = respond(store=False)
    with pytest.raises(openai.NotFoundError):
        scripted_openai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        respond(previous_response_id=first.id)


def test_nobody_else_finds_a_response(scripted, respond):
    first = respond()
    other = openai.OpenAI(base_url=scripted.url + "/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        other.responses.create(**BODY, previous_response_id=first.id)


def test_sealed_reasoning_comes_back(respond, prompt_is):
    body = {"tools": [WEATHER], "store": False, "include": ["reasoning.encrypted_content"], **THINK}
    first = respond("Deep thoughts.</think>Hello", **body)
    sealed = first.output[0].encrypted_content
    assert sealed and "Deep" not in sealed
    start, more = {"role": "user", "content": "go"}, {"role": "user", "content": "more"}
    items = [{"type": "reasoning", "id": "rs_another", "summary": [], "encrypted_content": sealed},
             {"role": "assistant", "content": "Hello"}]
    expected = f"<think>Deep thoughts.</think>Hello{EOS}{USER}more"
    assert prompt_is(expected, input=[start, *items, more], **body)
    damaged = [{**items[0], "encrypted_content": sealed[:-8] + "AAAAAAA="}, items[1]]
    assert prompt_is(f"<think></think>Hello{EOS}{USER}more", input=[start, *damaged, more], **body)
    assert respond("Hm.</think>Hi", **THINK).output[0].encrypted_content is None


def test_sealed_reasoning_outlives_a_server_that_has_keys(tmp_path):
    body = {**BODY, "store": False, "include": ["reasoning.encrypted_content"], "tools": [WEATHER], **THINK}

    def served(name, script, **fields):
        server = ScriptedServer.start(tmp_path / name, "--api-key", "secret")
        try:
            server.rules(script)
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
            return client.responses.create(**{**body, **fields})
        finally:
            server.stop()

    first = served("first", [{"say": "Deep thoughts.</think>Hello"}])
    items = [{"role": "user", "content": "go"}, *[item.model_dump(exclude={"content"} if item.type == "reasoning" else None,
                                                                  exclude_none=True) for item in first.output],
             {"role": "user", "content": "more"}]
    second = served("second", [{"say": "no"}, {"when": f"<think>Deep thoughts.</think>Hello{EOS}", "say": "yes"}], input=items)
    assert "yes" in second.model_dump_json()


def test_a_limit_makes_a_response_incomplete(scripted, respond, scripted_http):
    short = respond("one two three four five", max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    assert short.output[0].status == "incomplete" and short.usage.output_tokens == 2
    answer = scripted_http.post("/v1/responses", {**BODY, "max_output_tokens": 2, "stream": True})
    assert re.findall("event: (.*)", answer.text)[-1] == "response.incomplete"


def test_custom_tools_take_a_text(scripted, scripted_openai, prompt_is, respond):
    patch = {"type": "custom", "name": "apply_patch", "description": "Patches.",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
    text = calls(call("apply_patch", input="*** Begin\n\"x\""))
    first = respond(text, tools=[patch])
    assert first.output[0].type == "custom_tool_call" and first.output[0].input == '*** Begin\n"x"'
    events = list(scripted_openai.responses.create(**BODY, tools=[patch], stream=True))
    assert shape_of(events)[2:-1] == ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
                                      "output_item.done"]
    result = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "done"}
    items = [{"role": "user", "content": "go"}, first.output[0].model_dump(exclude_none=True), result]
    assert prompt_is(f"{ASSISTANT}</think>{text}{EOS}{USER}<tool_result>done</tool_result>", tools=[patch], input=items)


def test_calls_that_are_asked_for(respond, refused):
    text = calls(call("get_weather", city="Paris"))
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    for choice in ["required", {"type": "function", "name": "get_weather"}, allowed, "auto"]:
        assert [item.type for item in respond(text, tools=[WEATHER], tool_choice=choice).output] == ["function_call"]
    none = respond(text, tools=[WEATHER], tool_choice="none")
    assert [item.type for item in none.output] == ["message"] and none.output_text == text
    refused("tool_choice", tools=[WEATHER], tool_choice={"type": "function", "name": "get_time"})
    refused("tool_choice", tools=[WEATHER], tool_choice={"type": "bogus"})
    refused("tool_choice", tool_choice="required")


def test_an_answer_in_a_form(scripted, scripted_openai, refused):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
              "additionalProperties": False}
    scripted.say('{"city": "Paris"}')
    form = {"type": "json_schema", "name": "place", "strict": True, "schema": schema}
    assert json.loads(scripted_openai.responses.create(**BODY, text={"format": form}).output_text) == {"city": "Paris"}
    refused("text.format.schema", text={"format": {"type": "json_schema", "name": "place"}})
    refused("text.format", text={"format": {"type": "poem"}})


def test_hosted_tools_are_left_out(prompt_is):
    assert prompt_is(f"{BOS}{USER}go{ASSISTANT}</think>", tools=[{"type": "web_search"}])


def test_what_cannot_be_served_is_refused(refused):
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}
    assert "image" in refused("input[0].content[0]", input=[image])
    assert "at least 1" in refused("max_output_tokens", max_output_tokens=0)
    for field, value in [("background", True), ("top_logprobs", 5)]:
        refused(field, **{field: value})
    refused("input", input=[])
    refused("tools", tools=[{"type": "function"}])
    refused("reasoning_effort", reasoning={"effort": "banana"})


def test_a_prompt_that_is_too_long(respond):
    with pytest.raises(openai.BadRequestError) as long:
        respond(input="word " * 200_000)
    assert long.value.code == "context_length_exceeded" and long.value.param == "input"


def test_an_error_in_the_middle_is_an_event(tmp_path):
    server = ScriptedServer.start(tmp_path, "--drain-timeout", "0")
    server.say("word " * 400, step_ms=100)
    with HttpClient(server.port).begin("/v1/responses", {**BODY, "stream": True}) as connection:
        text = connection.recv(65536).decode()
        server.process.send_signal(signal.SIGTERM)
        while data := connection.recv(65536):
            text += data.decode()
    name, data = re.findall("event: (.*)\ndata: (.*)\n\n", text)[-1]
    failed = json.loads(data)["response"]
    assert name == "response.failed" and failed["status"] == "failed" and failed["error"]["message"]
    assert server.ended() == 0
