"""Conformance cases 108 to 134: Anthropic's endpoints, asked by the official client wherever it can say it."""

import json
import re
import signal

import anthropic
import pytest

from dsml import ASSISTANT, BOS, EOS, USER, call, calls
from http_client import HttpClient, eventually
from scripted_server import ScriptedServer

ASK = [{"role": "user", "content": "go"}]
BODY = {"model": "scripted", "max_tokens": 100, "messages": ASK}
THINK = {"type": "enabled", "budget_tokens": 1024}
WEATHER = {"name": "get_weather", "description": "The weather",
           "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}


def events_of(answer):
    """[(name, data)] of a stream."""
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = re.findall(r"event: (.*)\ndata: (.*)\n\n", answer.text)
    parsed = [(name, json.loads(data)) for name, data in events]
    assert all(name == data["type"] for name, data in parsed)
    return parsed


def names_of(events):
    return [name for name, _ in events]


@pytest.fixture
def messages(scripted, scripted_http):
    """Says a text and gives the answer to messages with these fields."""
    def ask(text="Hello there.", path="/v1/messages", headers=None, **fields):
        scripted.say(text)
        return scripted_http.post(path, {**BODY, **fields}, **(headers or {}))
    return ask


@pytest.fixture
def prompt_is(scripted, scripted_http):
    """Is this the prompt that messages with these fields make, sent with the official client's key?"""
    def check(expected, **fields):
        scripted.rules([{"say": "another prompt"}, {"when": expected, "say": "this prompt"}])
        answer = scripted_http.post("/v1/messages", {**BODY, **fields}, **{"x-api-key": "none"})
        assert answer.status == 200, answer.text
        return "this prompt" in answer.text
    return check


@pytest.fixture
def refused(messages):
    def check(**fields):
        answer = messages(**fields)
        assert answer.status == 400, answer.text
        assert answer.json["type"] == "error" and answer.error["type"] == "invalid_request_error"
        assert "\n" not in answer.error["message"]
        assert answer.json["request_id"] == answer.headers["request-id"]
        return answer.error["message"]
    return check


CONVERSATION = ("I must look.</think>Let me see."
                + calls(call("get_weather", city="Paris", days=2), call("get_weather", city="Rome")))


def test_c108_the_order_of_events(messages):
    events = events_of(messages(CONVERSATION, stream=True, thinking=THINK, tools=[WEATHER]))
    assert names_of(events)[:2] == ["message_start", "ping"]
    start = events[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["stop_sequence"] is None
    assert start["role"] == "assistant" and start["usage"]["input_tokens"] > 0 and start["usage"]["output_tokens"] <= 1
    shape = []
    for name, data in events[2:]:
        step = (name, data.get("index"), data.get("delta", {}).get("type"))
        if not shape or shape[-1] != step:  # deltas of one kind are one step
            shape.append(step)
    block = lambda index, *deltas: [("content_block_start", index, None),
                                    *[("content_block_delta", index, delta) for delta in deltas],
                                    ("content_block_stop", index, None)]
    assert shape == [*block(0, "thinking_delta", "signature_delta"), *block(1, "text_delta"),
                     *block(2, "input_json_delta"), *block(3, "input_json_delta"),
                     ("message_delta", None, None), ("message_stop", None, None)]
    assert sum(data.get("delta", {}).get("type") == "signature_delta" for _, data in events) == 1
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {"type": "text", "text": ""}
    for tool in starts[2:]:
        assert re.fullmatch("toolu_[0-9A-Za-z]{24}", tool["id"])
        assert {**tool, "id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {}}
    assert starts[2]["id"] != starts[3]["id"]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_c108_no_empty_text_stands_between_thinking_and_a_call(messages):
    for space in ["", "\n\n", "\n \n\n"]:
        events = events_of(messages("Hm.</think>" + space + calls(call("get_weather", city="Paris")), stream=True,
                                    thinking=THINK, tools=[WEATHER]))
        kinds = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
        assert kinds == ["thinking", "tool_use"]


@pytest.mark.parametrize("text, fields", [
    ("Hello there.", {}), ("", {}), ("Deep.</think>Answer", {"thinking": THINK}), (CONVERSATION, {"thinking": THINK}),
    (CONVERSATION.split("</think>")[1] + "And more.", {}), ("Only thoughts", {"thinking": THINK, "max_tokens": 3})])
def test_c109_the_stream_adds_up_to_the_whole_answer(scripted, scripted_anthropic, text, fields):
    scripted.say(text)
    body = {**BODY, "tools": [WEATHER], **fields}
    whole = scripted_anthropic.messages.create(**body)
    with scripted_anthropic.messages.stream(**body) as stream:
        streamed = stream.get_final_message()

    def comparable(message):
        out = message.model_dump(exclude={"id", "parsed_output"})
        for block in out["content"]:
            for own in ("id", "signature", "parsed_output"):
                block.pop(own, None)
        usage = out["usage"]  # the second request finds the first one's prompt
        usage["input_tokens"] += usage.pop("cache_read_input_tokens") or 0
        return out

    assert comparable(streamed) == comparable(whole)
    assert whole.content and whole.usage.output_tokens > 0


def test_c110_a_system_text_is_the_same_as_one_block(prompt_is):
    expected = f"{BOS}Be brief.{USER}go{ASSISTANT}</think>"
    assert prompt_is(expected, system="Be brief.")
    assert prompt_is(expected, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    two = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": ""}, {"type": "text", "text": "Be kind."}]
    assert prompt_is(f"{BOS}Be brief.\n\nBe kind.{USER}go", system=two)


def test_c111_the_billing_header_is_no_part_of_the_prompt(scripted_anthropic, prompt_is):
    expected = f"{BOS}Be brief.{USER}go{ASSISTANT}</think>"
    for changing in ["cc_version=2.1.9; cch=01234;", "cc_version=2.2.0; cch=98765;"]:
        header = f"x-anthropic-billing-header: {changing}"
        assert prompt_is(expected, system=[{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}])
        assert prompt_is(expected, system=header + "\nBe brief.")
    assert not prompt_is(expected, system="Be brief. x-anthropic-billing-header: x")


def test_c111_a_changed_billing_header_hits_the_cache(scripted, scripted_anthropic):
    scripted.say("Hello there.")
    rules = "A rule of many words, for a prompt of several blocks. " * 100
    usages = []
    for changing in ["cch=01234;", "cch=98765;"]:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {changing}"}, {"type": "text", "text": rules}]
        usages.append(scripted_anthropic.messages.create(**BODY, system=system).usage)
    first, second = usages
    assert second.cache_read_input_tokens > 500
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens


def test_c112_a_query_changes_nothing(messages):
    for path in ["/v1/messages?beta=true", "/anthropic/v1/messages", "/anthropic/messages?beta=true"]:
        assert messages("Hello there.", path=path).json["content"] == [{"type": "text", "text": "Hello there."}]


def test_c113_the_root_answers_probes(scripted_http):
    assert scripted_http.get("/").status == 200
    head = scripted_http.request("HEAD", "/")
    assert head.status == 200 and head.text == ""


def test_c114_a_suffix_in_brackets_is_served_and_echoed(scripted, scripted_anthropic):
    scripted.say("Hello there.")
    for name in ["scripted[1m]", "scripted[1M]", "claude-opus-4-8", "claude-sonnet-5[1m]"]:
        assert scripted_anthropic.messages.create(**{**BODY, "model": name}).model == name
    with pytest.raises(anthropic.NotFoundError) as missing:
        scripted_anthropic.messages.create(**{**BODY, "model": "another[1m]"})
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_c115_unknown_betas_are_ignored(scripted, scripted_anthropic):
    scripted.say("Hello there.")
    answer = scripted_anthropic.beta.messages.create(**BODY, betas=["context-1m-2025-08-07", "never-heard-of-2031-01-01"])
    assert answer.content[0].text == "Hello there."


def test_c116_max_tokens_is_required(refused, scripted_http):
    assert "max_tokens" in refused(max_tokens=None)
    assert "max_tokens" in refused(max_tokens=0)
    assert "max_tokens" in refused(max_tokens="5")


def turn_of(message):
    """An answer as its client sends it back."""
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


def results(message, *texts):
    uses = [block for block in message.content if block.type == "tool_use"]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": text}
                                        for use, text in zip(uses, texts, strict=True)]}


def test_c117_a_round_trip_goes_on_where_the_model_stood(scripted, scripted_anthropic, prompt_is):
    body = {**BODY, "tools": [WEATHER], "thinking": THINK}
    scripted.say(CONVERSATION)
    first = scripted_anthropic.messages.create(**body)
    assert first.stop_reason == "tool_use" and [block.type for block in first.content] == [
        "thinking", "text", "tool_use", "tool_use"]
    sampled = f"{USER}go{ASSISTANT}<think>{CONVERSATION}{EOS}{USER}<tool_result>sunny</tool_result>\n\n" \
              f"<tool_result>rain</tool_result>{ASSISTANT}<think>"
    back, result = turn_of(first), results(first, "sunny", "rain")
    assert prompt_is(sampled, **{**body, "messages": [*ASK, back, result]})
    # Whatever the client did to the reasoning.
    without = {**back, "content": back["content"][1:]}
    assert prompt_is(sampled, **{**body, "messages": [*ASK, without, result]})
    reworded = {**back, "content": [{"type": "thinking", "thinking": "I thought.", "signature": "x"}, *back["content"][1:]]}
    assert prompt_is(sampled, **{**body, "messages": [*ASK, reworded, result]})
    emptied = {**back, "content": [{**back["content"][0], "thinking": ""}, *back["content"][1:]]}
    assert prompt_is(sampled, **{**body, "messages": [*ASK, emptied, result]})


def test_c117_the_turn_that_was_sampled_is_cached(scripted, scripted_anthropic):
    scripted.say("Hm. " * 150 + CONVERSATION)
    body = {**BODY, "max_tokens": 5000, "tools": [WEATHER], "thinking": THINK}
    first = scripted_anthropic.messages.create(**body)
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    second = scripted_anthropic.messages.create(**{**body, "messages": [*ASK, turn_of(first), results(first, "a", "b")]})
    assert second.usage.cache_read_input_tokens > prompt + first.usage.output_tokens - 300  # but for the last block


def test_c117_a_signature_gives_back_reasoning_that_was_left_out(scripted, scripted_anthropic, prompt_is):
    body = {**BODY, "tools": [WEATHER], "thinking": {**THINK, "display": "omitted"}}
    scripted.say("Deep thoughts.</think>Hello")
    first = scripted_anthropic.messages.create(**body)
    assert first.content[0].type == "thinking" and first.content[0].thinking == ""
    assert 0 < len(first.content[0].signature) < 100
    more = [*ASK, turn_of(first), {"role": "user", "content": "more"}]
    assert prompt_is(f"<think>Deep thoughts.</think>Hello{EOS}{USER}more", **{**body, "messages": more, "thinking": THINK})


def test_c118_results_stand_in_the_order_of_the_calls(scripted, scripted_anthropic, prompt_is):
    body = {**BODY, "tools": [WEATHER]}
    scripted.say(CONVERSATION.split("</think>")[1])
    first = scripted_anthropic.messages.create(**body)
    result = results(first, "sunny", "rain")
    result["content"].reverse()
    result["content"].append({"type": "text", "text": "Well?"})
    assert prompt_is("<tool_result>sunny</tool_result>\n\n<tool_result>rain</tool_result>\n\nWell?",
                     **{**body, "messages": [*ASK, turn_of(first), result]})


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}]}


def test_c119_an_image_in_a_result_is_named_not_refused(prompt_is):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False,
              "content": [{"type": "text", "text": "a picture"}, image]}
    assert prompt_is("<tool_result>a picture\n\n[Unsupported image]</tool_result>", tools=[WEATHER],
                     messages=[*ASK, USE, {"role": "user", "content": [result]}])


def test_c119_a_result_needs_its_call(refused):
    result = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "x"}
    assert "toolu_2" in refused(messages=[*ASK, USE, {"role": "user", "content": [result]}])


def test_c120_an_image_of_the_user_is_refused(refused):
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    message = refused(messages=[{"role": "user", "content": [image]}])
    assert "image content is not supported by this model" in message and message.startswith("messages.0.content.0")
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    assert "plain text" in refused(messages=[{"role": "user", "content": [pdf]}])
    assert "container_upload" in refused(messages=[{"role": "user", "content": [{"type": "container_upload"}]}])


def test_c121_modes_of_thinking(prompt_is, refused, messages):
    thinks, chats = f"{USER}go{ASSISTANT}<think>", f"{USER}go{ASSISTANT}</think>"
    assert prompt_is(chats) and prompt_is(chats, thinking={"type": "disabled"})
    for on in [THINK, {"type": "enabled", "budget_tokens": 1}, {"type": "adaptive"},
               {"type": "adaptive", "budget_tokens": 9999}, {"type": "between_tools"}]:
        assert prompt_is(thinks, thinking=on), on
    assert prompt_is(thinks, thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert prompt_is(f"{BOS}Reasoning Effort: Absolute maximum", thinking={"type": "adaptive"},
                     output_config={"effort": "max"})
    assert prompt_is(chats, output_config={"effort": "high"})  # an effort turns nothing on
    assert "thinking.type" in refused(thinking={"type": "bogus"})
    assert "effort" in refused(thinking=THINK, output_config={"effort": "banana"})
    answer = messages("Deep.</think>Hi", thinking=THINK).json
    assert answer["content"][0]["thinking"] == "Deep." and answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_c122_thinking_of_others_is_taken(prompt_is):
    for block in [{"type": "redacted_thinking", "data": "abc"}, {"type": "thinking", "thinking": "", "signature": ""}]:
        turn = {"role": "assistant", "content": [block, {"type": "text", "text": "Hello"}]}
        assert prompt_is(f"{ASSISTANT}<think></think>Hello{EOS}{USER}more", thinking=THINK, tools=[WEATHER],
                         messages=[*ASK, turn, {"role": "user", "content": "more"}])
    foreign = {"type": "thinking", "thinking": "Elsewhere.", "signature": "c2lnbmVkIGVsc2V3aGVyZQ=="}
    turn = {"role": "assistant", "content": [foreign, {"type": "text", "text": "Hello"}]}
    assert prompt_is("<think>Elsewhere.</think>Hello", thinking=THINK, tools=[WEATHER],
                     messages=[*ASK, turn, {"role": "user", "content": "more"}])
    empty = {"role": "assistant", "content": []}
    assert prompt_is(f"{ASSISTANT}</think>{EOS}{USER}more", messages=[*ASK, empty, {"role": "user", "content": "more"}])


def test_c123_server_tools_are_left_out(messages, prompt_is, refused):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    answer = messages("I know it.", tools=[search]).json
    assert answer["content"] == [{"type": "text", "text": "I know it."}]
    assert prompt_is(f"{BOS}{USER}go{ASSISTANT}</think>", tools=[search])
    assert "bash_20250124" in refused(tools=[{"type": "bash_20250124", "name": "bash"}])
    assert "tool_choice" in refused(tools=[search], tool_choice={"type": "tool", "name": "web_search"})


def test_c124_stop_sequences(messages, scripted_http):
    answer = messages("one END two", stop_sequences=["never", "END"]).json
    assert answer["content"] == [{"type": "text", "text": "one "}]
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == "END"
    events = events_of(messages("one END two", stop_sequences=["END"], stream=True))
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_c125_max_tokens_ends_with_max_tokens(messages):
    answer = messages("one two three four five", max_tokens=2).json
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 2
    cut = messages(calls(call("get_weather", city="Paris " * 30)), max_tokens=40, tools=[WEATHER]).json
    assert cut["stop_reason"] == "max_tokens" and cut["content"][-1]["input"] == {}


def test_c126_counts_are_the_usage_of_the_same_messages(scripted, scripted_anthropic):
    scripted.say("Hello there.")
    bodies = [{"messages": ASK},
              {"messages": ASK, "system": "Be brief.", "tools": [WEATHER], "thinking": THINK},
              {"messages": [*ASK, USE, {"role": "user", "content": [
                  {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]}], "tools": [WEATHER]}]
    for body in bodies:
        count = scripted_anthropic.messages.count_tokens(model="scripted", **body).input_tokens
        usage = scripted_anthropic.messages.create(model="scripted", max_tokens=5, **body).usage
        assert count == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        with scripted_anthropic.messages.stream(model="scripted", max_tokens=5, **body) as stream:
            usage = stream.get_final_message().usage
        assert count == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A short context, one sequence at a time, a short queue, quick pings."""
    server = ScriptedServer.start(tmp_path_factory.mktemp("small"), "--max-model-len", "512", "--max-num-seqs", "1",
                                  "--max-queue", "2", "--keep-alive-interval", "1")
    yield server
    server.stop()


def test_c127_a_prompt_that_is_too_long(small):
    client = anthropic.Anthropic(base_url=small.url, api_key="x", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**{**BODY, "messages": [{"role": "user", "content": "word " * 2000}]})
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 511 maximum", long.value.body["error"]["message"])


def test_c128_roles_beyond_user_and_assistant(prompt_is, refused):
    assert prompt_is(f"{BOS}Be brief.\n\nBe kind.{USER}go", system="Be brief.",
                     messages=[{"role": "system", "content": "Be kind."}, *ASK])
    late = [*ASK, {"role": "assistant", "content": "yes"}, {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "more"}]
    assert prompt_is(f"{BOS}{USER}go{ASSISTANT}</think>yes{EOS}{USER}Be kind.\n\nmore{ASSISTANT}</think>", messages=late)
    for role in ["ctx", "msg"]:
        assert prompt_is(f"{USER}go\n\nmore{ASSISTANT}", messages=[*ASK, {"role": role, "content": "more"}])
    assert "role" in refused(messages=[{"role": "robot", "content": "go"}])


def test_c128_system_messages_in_the_middle(prompt_is):
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "get_weather"}}
    inline = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "f"}}}
    system = {"role": "system", "content": [change, {"type": "text", "text": "Be kind."}, inline]}
    assert prompt_is(f'{USER}go\n\nBe kind.\n\nA tool was added:\n{{"name": "f"}}{ASSISTANT}</think>', tools=[WEATHER],
                     messages=[*ASK, system, {"role": "system", "output_config": {"effort": "low"}}])
    for_once = {"role": "system", "content": "Now only.", "clear_at": "next_user_message"}
    assert prompt_is(f"{USER}go\n\nNow only.{ASSISTANT}", messages=[*ASK, for_once])
    later = [*ASK, for_once, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert prompt_is(f"{USER}go{ASSISTANT}</think>yes{EOS}{USER}more", messages=later)


def test_c129_a_body_of_30_mb(messages):
    answer = messages("Hello there.", metadata={"user_id": "u", "padding": "x" * 30_000_000})
    assert answer.status == 200


def test_c130_pings_during_a_long_prefill(small):
    tell = small.say_when_told("Hello")
    with HttpClient(small.port).begin("/v1/messages", {**BODY, "max_tokens": 5, "stream": True}) as connection:
        text = ""
        while text.count("event: ping") < 3:
            text += connection.recv(65536).decode()
        tell()
        while "message_stop" not in text:
            text += connection.recv(65536).decode()
    names = re.findall(r"event: (\w+)\n", text)
    first_block = names.index("content_block_start")
    assert names[:first_block] == ["message_start", *["ping"] * (first_block - 1)] and names[-1] == "message_stop"


def test_c131_overload_is_529(small):
    small.say("word " * 400, step_ms=100)
    http = HttpClient(small.port)
    connections = [http.begin("/v1/messages", {**BODY, "max_tokens": 400, "stream": True}) for _ in range(3)]
    busy = ["vllm:num_requests_running", "vllm:num_requests_waiting"]
    assert eventually(lambda: sum(http.metric(name) for name in busy) == 3)
    with pytest.raises(anthropic.APIStatusError) as full:
        anthropic.Anthropic(base_url=small.url, api_key="x", max_retries=0).messages.create(**BODY)
    assert full.value.status_code == 529 and full.value.body["error"]["type"] == "overloaded_error"
    assert int(full.value.response.headers["retry-after"]) > 0
    for connection in connections:
        connection.close()
    assert eventually(lambda: sum(http.metric(name) for name in busy) == 0)


def test_c131_an_error_in_the_middle_is_an_event(tmp_path):
    server = ScriptedServer.start(tmp_path, "--drain-timeout", "0")
    server.say("word " * 400, step_ms=100)
    with HttpClient(server.port).begin("/v1/messages", {**BODY, "max_tokens": 400, "stream": True}) as connection:
        text = connection.recv(65536).decode()
        server.process.send_signal(signal.SIGTERM)
        while data := connection.recv(65536):
            text += data.decode()
    assert "message_stop" not in text
    name, data = re.findall(r"event: (.*)\ndata: (.*)\n\n", text)[-1]
    assert name == "error"
    assert json.loads(data)["error"]["type"] == "overloaded_error" and json.loads(data)["error"]["message"]
    assert server.ended() == 0


def test_c132_more_keys_in_a_tool_are_ignored(prompt_is):
    more = {**WEATHER, "input_examples": [{"city": "Rome"}], "cache_control": {"type": "ephemeral"},
            "defer_loading": True, "eager_input_streaming": True, "strict": True, "type": "custom"}
    schema = '{"name": "get_weather", "description": "The weather", "parameters": {"type": "object", "properties": ' \
             '{"city": {"type": "string"}, "days": {"type": "integer"}}}}'
    for tool in [WEATHER, more]:
        assert prompt_is(f"### Available Tool Schemas\n\n{schema}\n\n", tools=[tool])
    no_type = {"name": "f", "input_schema": {"properties": {}}}
    assert prompt_is('{"name": "f", "parameters": {"properties": {}, "type": "object"}}', tools=[no_type])


def test_c133_arguments_that_are_cut_are_no_error(messages):
    text = calls('<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="days" string="false">{bad</｜DSML｜parameter>\n'
                 "</｜DSML｜invoke>")
    answer = messages(text, tools=[WEATHER]).json
    assert answer["content"][0]["input"] == {"days": "{bad"} and answer["stop_reason"] == "tool_use"
    open_call = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Par'
    cut = messages(open_call, tools=[WEATHER], max_tokens=1000).json
    assert cut["content"][0]["input"] == {"city": "Par"}
    for length in range(1, 40, 3):
        answer = messages(calls(call("get_weather", city="Paris")), tools=[WEATHER], max_tokens=length)
        assert answer.status == 200
        for block in answer.json["content"]:
            assert block["type"] == "text" or isinstance(block["input"], dict)


def test_c134_the_users_id_is_no_part_of_the_prompt(prompt_is):
    for user in ["user_1", json.dumps({"device_id": "d" * 300, "session_id": "s"}), "\u2028\n"]:
        assert prompt_is(f"{BOS}{USER}go{ASSISTANT}</think>", metadata={"user_id": user})


def test_tool_choice_none_leaves_calls_in_the_text(messages):
    text = calls(call("get_weather", city="Paris"))
    answer = messages(text, tools=[WEATHER], tool_choice={"type": "none"}).json
    assert answer["content"] == [{"type": "text", "text": text}] and answer["stop_reason"] == "end_turn"


def test_calls_that_are_asked_for(messages, refused):
    text = calls(call("get_weather", city="Paris"))
    for choice in [{"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "auto"}]:
        answer = messages(text, tools=[WEATHER], tool_choice=choice).json
        assert [block["type"] for block in answer["content"]] == ["tool_use"] and answer["stop_reason"] == "tool_use"
    assert "get_time" in refused(tools=[WEATHER], tool_choice={"type": "tool", "name": "get_time"})
    assert "tool_choice" in refused(tools=[WEATHER], tool_choice={"type": "bogus"})
    assert "tool_choice" in refused(tool_choice={"type": "any"})


def test_an_answer_in_a_form(messages, refused):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
              "additionalProperties": False}
    answer = messages('{"city": "Paris"}', output_config={"format": {"type": "json_schema", "schema": schema}}).json
    assert json.loads(answer["content"][0]["text"]) == {"city": "Paris"}
    assert "output_config.format" in refused(output_config={"format": {"type": "json_schema"}})
    assert "output_config.format" in refused(output_config={"format": {"type": "poem"}})


def test_one_call_where_parallel_ones_are_turned_off(messages):
    two = calls(call("get_weather", city="Paris"), call("get_weather", city="Rome"))
    answer = messages(two, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json
    assert [block["input"] for block in answer["content"]] == [{"city": "Paris"}]


def test_an_answer_that_is_begun_is_continued(prompt_is, refused):
    begun = [*ASK, {"role": "assistant", "content": "Well, "}]
    assert prompt_is(f"{USER}go{ASSISTANT}</think>Well, ", messages=begun)
    assert prompt_is(f"{USER}go{ASSISTANT}</think>Well, ", messages=begun, thinking=THINK)
    assert "tool_result" in refused(messages=[*ASK, USE])


def test_models_as_anthropics_client_reads_them(scripted_anthropic):
    models = scripted_anthropic.models.list()
    assert [card.id for card in models.data] == ["scripted"] and models.data[0].created_at.year >= 2024


def test_errors_before_the_handler_have_anthropics_form(tmp_path):
    server = ScriptedServer.start(tmp_path, "--api-key", "secret", "--max-body-bytes", "1M")
    try:
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**BODY)
        assert wrong.value.body["error"]["type"] == "authentication_error" and wrong.value.body["request_id"]
        for credentials in [{"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}]:
            client = anthropic.Anthropic(base_url=server.url, max_retries=0, **credentials)
            assert client.messages.create(**BODY).content[0].text == "Hello there."
        http = HttpClient(server.port)
        large = http.post("/v1/messages", {**BODY, "x": "x" * 2_000_000}, **{"x-api-key": "secret"})
        assert large.status == 413 and large.error["type"] == "request_too_large"
        bad = http.post("/v1/messages", b"{bad", **{"x-api-key": "secret"})
        assert bad.status == 400 and bad.error["type"] == "invalid_request_error"
        assert http.request("GET", "/v1/messages", headers={"x-api-key": "secret"}).json["type"] == "error"
    finally:
        server.stop()
