"""Conformance cases 20 to 50: from the model's text to reasoning, content and tool calls, streamed and whole."""

import json

import pytest

from scripted_server import ScriptedServer
from http_client import HttpClient

ASK = [{"role": "user", "content": "go"}]
THINK = {"thinking": {"type": "enabled"}}
DSML = "｜DSML｜"


def tool(name, properties=None):
    return {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": properties or {}}}}


TOOLS = {"tools": [tool("f", {"s": {"type": "string"}}), tool("g")]}


def parameter(name, value, string=True):
    return f'<{DSML}parameter name="{name}" string="{str(string).lower()}">{value}</{DSML}parameter>\n'


def invoke(name, *parameters):
    return f'<{DSML}invoke name="{name}">\n{"".join(parameters)}</{DSML}invoke>\n'


def block(*invokes):
    return f"\n\n<{DSML}tool_calls>\n{''.join(invokes)}</{DSML}tool_calls>"


def joined(chunks):
    """The message that the chunks of a stream make, as a client joins them, and the finish reason."""
    message, calls, finish = {"content": None}, {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key) is not None:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] not in calls and call["function"]["arguments"] == ""
                    calls[call["index"]] = {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                else:
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    message["tool_calls"] = [calls[idx] for idx in sorted(calls)]
    assert sorted(calls) == list(range(len(calls)))
    return message, finish


class Parsed:
    """One answer, asked for whole and streamed by the official client: both must say the same."""

    def __init__(self, client, ask, **fields):
        fields = {"messages": ASK, **fields}
        whole = ask(**fields)
        assert whole.status == 200, whole.text
        choice = whole.json["choices"][0]
        self.message, self.finish, self.stop_reason = choice["message"], choice["finish_reason"], choice["stop_reason"]
        self.reasoning = self.message.get("reasoning_content")
        self.content = self.message["content"]
        self.calls = [(call["function"]["name"], call["function"]["arguments"])
                      for call in self.message.get("tool_calls", [])]
        self.usage = whole.json["usage"]
        messages = fields.pop("messages")
        stream = client.chat.completions.create(model="scripted", messages=messages, stream=True, extra_body=fields)
        self.chunks = [chunk.model_dump(exclude_unset=True) for chunk in stream]
        streamed, finish = joined(self.chunks)
        assert (streamed["content"] or "") == (self.content or "")
        assert (streamed.get("reasoning_content") or "") == (self.reasoning or "")
        assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == self.calls
        assert finish == self.finish
        for _, arguments in self.calls:
            assert isinstance(json.loads(arguments), dict)

    def deltas(self, key):
        found = (choice["delta"].get(key) for chunk in self.chunks for choice in chunk["choices"])
        return [text for text in found if text]


@pytest.fixture
def answered(scripted_openai, official_chat):
    return lambda **fields: Parsed(scripted_openai, official_chat, **fields)


@pytest.fixture
def said(scripted, answered):
    def parse(text, **fields):
        scripted.say(text)
        return answered(**fields)
    return parse


def test_c020_reasoning_ends_at_its_tag(said):
    answer = said("R</think>A", **THINK)
    assert (answer.reasoning, answer.content, answer.finish) == ("R", "A", "stop")


def test_c021_an_answer_without_thinking_has_no_reasoning(said):
    answer = said("A")
    assert answer.content == "A" and "reasoning_content" not in answer.message and "reasoning" not in answer.message


def test_c022_an_answer_cut_inside_thinking_is_reasoning_only(said):
    answer = said("many words of reasoning that go on and on</think>A", max_tokens=4, **THINK)
    assert answer.reasoning and not answer.content and answer.finish == "length"


def test_c023_a_tag_spelt_out_in_pieces_never_leaks(scripted, scripted_http, answered):
    pieces = ["</", "th", "in", "k", ">"]
    ids = [scripted_http.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
           for text in ["R", *pieces, "A"]]
    scripted.rules([{"ids": sum(ids, [])}])
    answer = answered(**THINK)
    assert answer.reasoning == "R" and answer.content == "A"
    assert not any(set("<>/") & set(text) for key in ("reasoning_content", "content") for text in answer.deltas(key))


def test_c024_a_lone_angle_bracket_is_not_held_back(said):
    answer = said("a < b and c", **TOOLS)
    assert answer.content == "a < b and c"
    assert "<" in "".join(answer.deltas("content")[:-2])


def test_c025_blank_lines_at_the_end_are_flushed(said):
    answer = said("x\n\n", **TOOLS)
    assert answer.content == "x\n\n" and answer.finish == "stop"


def test_c026_two_invokes_are_two_calls(said):
    answer = said("Well." + block(invoke("f", parameter("s", "x")), invoke("g")), **TOOLS)
    assert answer.calls == [("f", '{"s": "x"}'), ("g", "{}")] and answer.finish == "tool_calls"
    assert answer.content == "Well."
    ids = [call["id"] for call in answer.message["tool_calls"]]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)


def test_c027_markup_one_character_at_a_time_gives_the_same_calls(scripted, scripted_http, answered):
    text = block(invoke("f", parameter("s", 'a "quoted"\ntext'), parameter("n", "[1, 2]", False)), invoke("g"))
    scripted.say("Hm." + text)
    by_words = answered(**TOOLS)
    ids = []
    for part in ("Hm." + text).replace(DSML, "\0"):
        piece = DSML if part == "\0" else part
        ids += scripted_http.post("/tokenize", {"prompt": piece, "add_special_tokens": False}).json["tokens"]
    scripted.rules([{"ids": ids}])
    by_characters = answered(**TOOLS)
    assert by_characters.calls == by_words.calls and by_characters.content == by_words.content == "Hm."
    assert by_words.calls[0] == ("f", json.dumps({"s": 'a "quoted"\ntext', "n": [1, 2]}))


@pytest.mark.parametrize("value", ['"', "\\", "a\nb", "\t", "😀", "\u0001", '{"a": "\\n"}', "</s>", ""])
def test_c028_text_parameters_become_equal_json_strings(said, value):
    answer = said(block(invoke("f", parameter("s", value))), **TOOLS)
    assert json.loads(answer.calls[0][1]) == {"s": value}


def test_c029_a_fragment_of_a_closing_tag_is_text(said):
    value = f"x</{DSML}param y </{DSML}parameterz"
    answer = said(block(invoke("f", parameter("s", value))), **TOOLS)
    assert json.loads(answer.calls[0][1]) == {"s": value}


def test_c030_what_is_no_json_becomes_a_string(said):
    answer = said(block(invoke("f", parameter("v", "{bad", False))), **TOOLS)
    assert json.loads(answer.calls[0][1]) == {"v": "{bad"}


@pytest.mark.parametrize("value", ["true", "null", "1e5", '[[1, {"a": [2]}], "x"]', "-0.5", '{"k": {}}'])
def test_c031_json_parameters_keep_their_types(said, value):
    answer = said(block(invoke("f", parameter("v", value, False))), **TOOLS)
    assert json.loads(answer.calls[0][1]) == {"v": json.loads(value)}


@pytest.mark.parametrize("body", ["\n", "", "\n\n"])
def test_c032_an_invoke_without_parameters_has_an_empty_object(said, body):
    text = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="g">{body}</{DSML}invoke>\n</{DSML}tool_calls>'
    assert said(text, **TOOLS).calls == [("g", "{}")]


def test_c033_a_block_inside_thinking_ends_it(said):
    answer = said("Let me see." + block(invoke("g")), **TOOLS, **THINK)
    assert answer.reasoning == "Let me see." and answer.calls == [("g", "{}")] and answer.finish == "tool_calls"


def test_c034_a_complete_call_needs_no_end_of_its_block(said):
    answer = said(f"\n\n<{DSML}tool_calls>\n" + invoke("f", parameter("s", "x")), **TOOLS)
    assert answer.calls == [("f", '{"s": "x"}')] and answer.finish == "tool_calls"


def test_c035_a_call_cut_by_its_own_end_is_closed(said):
    answer = said(f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="s" string="true">half', **TOOLS)
    assert answer.calls == [("f", '{"s": "half"}')]


def test_c036_markup_without_tools_is_content(said):
    text = "See:" + block(invoke("g"))
    answer = said(text)
    assert answer.content == text and answer.calls == [] and answer.finish == "stop"


def test_c037_tool_choice_none_leaves_markup_in_the_content(said):
    text = "See:" + block(invoke("g"))
    answer = said(text, tool_choice="none", **TOOLS)
    assert answer.content == text and answer.calls == [] and answer.finish == "stop"


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
BARE_TOOLS = {"tools": [{"type": "function", "function": {"name": name, "parameters": NO_ARGUMENTS}}
                        for name in ("f", "g")]}


@pytest.mark.parametrize("fields,text", [({}, "I would rather talk."), (THINK, "Hm.</think>I would rather talk.")],
                         ids=["chat", "thinking"])
def test_c038_required_gives_a_call_whatever_the_model_wants(scripted, scripted_http, fields, text):
    scripted.say(text)
    choice = scripted_http.post("/v1/chat/completions", {"messages": ASK, "tool_choice": "required", **BARE_TOOLS,
                                                         **fields, "max_tokens": 4000}).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) >= 1
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} <= {"f", "g"}


def test_c039_a_named_choice_gives_that_tool_only(scripted, scripted_http):
    scripted.say(block(invoke("f")))
    choice = scripted_http.post("/v1/chat/completions", {
        "messages": ASK, "tool_choice": {"type": "function", "function": {"name": "g"}}, **BARE_TOOLS,
        "max_tokens": 4000}).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"g"}


def test_c040_a_choice_of_a_missing_tool_is_refused(scripted_http):
    for choice in [{"type": "function", "function": {"name": "missing"}}, "sometimes", {"type": "function"}]:
        answer = scripted_http.post("/v1/chat/completions", {"messages": ASK, "tool_choice": choice, **TOOLS})
        assert answer.status == 400 and answer.error["param"] == "tool_choice"
    without = scripted_http.post("/v1/chat/completions", {"messages": ASK, "tool_choice": "auto"})
    assert without.status == 400 and without.error["param"] == "tool_choice"


def test_c041_one_call_when_calls_are_not_parallel(said):
    answer = said(block(invoke("f", parameter("s", "x")), invoke("g")), parallel_tool_calls=False, **TOOLS)
    assert answer.calls == [("f", '{"s": "x"}')] and answer.finish == "tool_calls"


@pytest.mark.parametrize("name", ["arguments", "input"])
@pytest.mark.parametrize("string", [True, False])
def test_c042_arguments_wrapped_in_one_parameter_are_unwrapped(said, name, string):
    answer = said(block(invoke("f", parameter(name, '{"s": "x"}', string))), **TOOLS)
    assert json.loads(answer.calls[0][1]) == {"s": "x"}


def test_c043_a_character_of_several_tokens_comes_whole(said, scripted_http):
    ids = scripted_http.post("/tokenize", {"prompt": "🦩", "add_special_tokens": False}).json["tokens"]
    assert len(ids) >= 3
    answer = said("a🦩b")
    assert answer.content == "a🦩b" and "🦩" in "".join(answer.deltas("content"))
    assert not any("\ufffd" in text for text in answer.deltas("content"))


def ids_of(http, *texts):
    return sum((http.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
                for text in texts), [])


def test_c044_a_stop_string_in_two_tokens_is_trimmed(scripted, scripted_http, answered):
    scripted.rules([{"ids": ids_of(scripted_http, "go on ", "E", "ND", " more")}])
    answer = answered(stop=["END"])
    assert (answer.content, answer.finish, answer.stop_reason) == ("go on ", "stop", "END")
    assert not any("E" in text for text in answer.deltas("content"))


def test_c045_a_stop_string_may_begin_inside_itself(said):
    answer = said("aab and more", stop="ab")
    assert (answer.content, answer.finish, answer.stop_reason) == ("a", "stop", "ab")


def test_c046_the_stop_string_is_kept_when_asked(said):
    answer = said("one END two", stop="END", include_stop_str_in_output=True)
    assert (answer.content, answer.stop_reason) == ("one END", "END")


def test_c047_stop_strings_are_looked_for_in_the_content_only(said):
    answer = said("I END here</think>and END there", stop="END", **THINK)
    assert (answer.reasoning, answer.content, answer.stop_reason) == ("I END here", "and ", "END")


def test_c048_the_stop_string_that_ends_first_wins(said):
    answer = said("xabcd", stop=["bcd", "abc"])
    assert (answer.content, answer.stop_reason) == ("x", "abc")
    answer = said("xabcd", stop=["abcde", "c"])
    assert (answer.content, answer.stop_reason) == ("xab", "c")


def test_c049_an_incomplete_character_at_the_end_is_shown_once(scripted, scripted_http, answered):
    flamingo = ids_of(scripted_http, "🦩")
    scripted.rules([{"ids": ids_of(scripted_http, "ok ") + flamingo[:-1]}])
    answer = answered()
    assert answer.content == "ok \ufffd"


def test_c050_a_model_that_begins_another_turn_stops(said):
    for token in ["<｜User｜>", "<｜Assistant｜>"]:
        answer = said(f"mine{token}theirs")
        assert (answer.content, answer.finish, answer.stop_reason) == ("mine", "stop", None)


def test_c050_control_tokens_never_show(tmp_path, said):
    answer = said("a<｜begin▁of▁sentence｜>b")
    assert answer.content == "ab"
