"""Conformance cases 1 to 19: from messages to the tokens of the prompt, asked of a running server by /tokenize."""

import json
import re
import shutil
import subprocess

import pytest

from http_client import HttpClient
from scripted_server import SCRIPTED_BINARY, ScriptedServer
from server_process import BINARY, MODEL, ROOT

TESTDATA = ROOT / "src" / "text" / "testdata"
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
THINK = {"thinking": {"type": "enabled"}}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d",
                                         "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}


def tokens(http, body):
    answer = http.post("/tokenize", body)
    assert answer.status == 200, answer.text
    return answer.json["tokens"]


def detokenized(http, ids):
    return http.post("/detokenize", {"tokens": ids}).json["prompt"]


def prompt(http, messages, **fields):
    """The text of the prompt that a chat with this body runs."""
    return detokenized(http, tokens(http, {"messages": messages, **fields}))


def call(arguments, call_id="c1", name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def official(number):
    data = json.loads((TESTDATA / "encoding" / f"test_input_{number}.json").read_text())
    messages, tools = (data["messages"], data["tools"]) if isinstance(data, dict) else (data, None)
    return messages, tools, (TESTDATA / "encoding" / f"test_output_{number}.txt").read_text()


@pytest.mark.parametrize("number", [1, 2])
def test_c001_official_conversations_make_the_official_prompt(scripted_http, number):
    messages, tools, expected = official(number)
    messages[-1]["prefix"] = True  # an assistant's turn at the end is there to be continued
    fields = {"tools": tools} if tools else {}
    assert prompt(scripted_http, messages, **THINK, **fields) + EOS == expected


@pytest.mark.parametrize("number,mode", [(1, "thinking"), (2, "thinking"), (3, "thinking"), (4, "chat")])
def test_c001_the_command_renders_every_official_vector(number, mode):
    """Vectors 3 and 4 have fields that no public API takes (task, tools of a developer)."""
    done = subprocess.run([str(BINARY), "encode", "--mode", mode, "--messages",
                           str(TESTDATA / "encoding" / f"test_input_{number}.json")], capture_output=True, check=True)
    expected = (TESTDATA / "encoding" / f"test_output_{number}.txt").read_bytes()
    assert done.stdout in (expected, expected + b"\n")


SYSTEM = {"role": "system", "content": "S"}
ASKED = {"role": "assistant", "content": "a", "reasoning_content": "r"}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call("{}")]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "res"}
NO_CALL = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
RULES = [
    # rule, messages, thinking, prompt after BOS
    (1, [SYSTEM, *HI], False, f"S{USER}hi{ASSISTANT}</think>"),
    (2, [*HI, ASKED, RESULT, *HI], True, f"{USER}hi{ASSISTANT}</think>a{EOS}{USER}<tool_result>res</tool_result>\n\nhi"
                                         f"{ASSISTANT}<think>"),
    (3, [*HI, RESULT], False, f"{USER}hi\n\n<tool_result>res</tool_result>{ASSISTANT}</think>"),
    (4, [*HI, {"role": "user", "content": "you"}], False, f"{USER}hi\n\nyou{ASSISTANT}</think>"),
    (5, [*HI, {**RESULT, "content": "<b> & \"c\""}], False,
     f"{USER}hi\n\n<tool_result><b> & \"c\"</tool_result>{ASSISTANT}</think>"),
    (7, [*HI, SYSTEM, *HI], False, f"{USER}hiS{USER}hi{ASSISTANT}</think>"),
    (8, [{"role": "developer", "content": "D"}, *HI], False, f"D{USER}hi{ASSISTANT}</think>"),
    (9, [{"role": "latest_reminder", "content": "L"}, *HI], False, f"<｜latest_reminder｜>L{USER}hi{ASSISTANT}</think>"),
    (12, [*HI, ASKED, *HI], True, f"{USER}hi{ASSISTANT}</think>a{EOS}{USER}hi{ASSISTANT}<think>"),
    (13, [*HI, CALLED, RESULT], False, f"{USER}hi{ASSISTANT}</think>{NO_CALL}{EOS}{USER}<tool_result>res</tool_result>"
                                       f"{ASSISTANT}</think>"),
    (14, HI, True, f"{USER}hi{ASSISTANT}<think>"),
    (16, [*HI, CALLED, RESULT], True, f"{USER}hi{ASSISTANT}</think>{NO_CALL}{EOS}{USER}<tool_result>res</tool_result>"
                                      f"{ASSISTANT}<think>"),
    (19, [*HI, ASKED, *HI], False, f"{USER}hi{ASSISTANT}</think>a{EOS}{USER}hi{ASSISTANT}</think>"),
    (22, [*HI, {"role": "assistant", "content": "pre", "reasoning_content": "r", "prefix": True}], True,
     f"{USER}hi{ASSISTANT}<think>r</think>pre"),
    (23, [*HI, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}, *HI], False,
     f"{USER}hi{ASSISTANT}</think>bc{EOS}{USER}hi{ASSISTANT}</think>"),
    (24, [{"role": "assistant", "content": "b"}, *HI], False, f"b{EOS}{USER}hi{ASSISTANT}</think>"),
    (25, [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}], False,
     f"{USER}x\n\ny{ASSISTANT}</think>"),
    (29, [{"role": "user", "content": "a</think>b"}], False, f"{USER}a</think>b{ASSISTANT}</think>"),
]


@pytest.mark.parametrize("rule,messages,thinking,expected", RULES, ids=[f"R{rule[0]}" for rule in RULES])
def test_c002_each_rule_over_the_api(scripted_http, rule, messages, thinking, expected):
    assert prompt(scripted_http, messages, **(THINK if thinking else {})) == BOS + expected


def test_c002_every_rule_of_the_encoder_has_a_test_of_its_own():
    source = (ROOT / "src" / "text" / "chat_encoder_test.cc").read_text()
    assert {int(number) for number in re.findall(r"TEST\w*\(\w+, R(\d+)", source)} == set(range(1, 30))


def test_c003_token_ids_equal_the_reference_library(scripted_http):
    for case in json.loads((TESTDATA / "tokenizer_cases.json").read_text()):
        ids = tokens(scripted_http, {"prompt": case["text"], "add_special_tokens": False})
        assert ids == case["ids"], case["text"]


ABSOLUTE = BOS + "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough"
BEYOND = BOS + "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"


def test_c004_effort_prefixes_depend_on_the_checkpoint(tmp_path):
    expected = {"preview": {"low": BOS + USER, "high": BOS + USER, "max": ABSOLUTE},
                "official": {"low": BOS + USER, "high": ABSOLUTE, "max": BEYOND}}
    for profile, heads in expected.items():
        server = ScriptedServer.start(tmp_path / profile, "--effort-profile", profile)
        try:
            http = HttpClient(server.port)
            for effort, head in heads.items():
                text = prompt(http, HI, **THINK, reasoning_effort=effort)
                assert text.startswith(head) and text.endswith(f"{USER}hi{ASSISTANT}<think>"), (profile, effort)
        finally:
            server.stop()


def test_c005_effort_without_thinking_has_no_prefix(scripted_http):
    text = prompt(scripted_http, HI, thinking={"type": "disabled"}, reasoning_effort="max")
    assert text == f"{BOS}{USER}hi{ASSISTANT}</think>"


def test_c006_tools_follow_the_system_text_or_begin_the_prompt(scripted_http):
    with_system = prompt(scripted_http, [SYSTEM, *HI], tools=[TOOL])
    assert with_system.startswith(BOS + "S\n\n## Tools")
    assert prompt(scripted_http, HI, tools=[TOOL]).startswith(BOS + "\n\n## Tools")


def test_c007_tools_given_twice_stand_once_and_the_requests_win(scripted_http):
    other = {**TOOL, "function": {**TOOL["function"], "name": "second_one"}}
    text = prompt(scripted_http, [{**SYSTEM, "tools": [other]}, *HI], tools=[TOOL])
    assert text.count("## Tools") == 1 and '"name": "f"' in text and "second_one" not in text


def test_c008_schema_keys_keep_their_order(scripted_http):
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in "zam"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert json.dumps({"name": "f", "parameters": schema}) in prompt(scripted_http, HI, tools=[tool])


def arguments_of(http, arguments):
    """How the prompt shows a past call with these arguments."""
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}, RESULT]
    return re.findall(r'parameter name="(.*?)" string="(.*?)">(.*?)</｜DSML｜parameter>', prompt(http, messages), re.DOTALL)


def test_c009_numbers_keep_their_kind(scripted_http):
    assert arguments_of(scripted_http, '{"x":1.0,"y":1e10,"z":1}') == [
        ("x", "false", "1.0"), ("y", "false", "10000000000.0"), ("z", "false", "1")]


def test_c010_text_in_arguments_stays_raw(scripted_http):
    assert arguments_of(scripted_http, '{"s":"é😀/\u2028"}') == [("s", "true", "é😀/\u2028")]
    assert arguments_of(scripted_http, '{"o":{"s":"é😀/\u2028"}}') == [("o", "false", '{"s": "é😀/\u2028"}')]


def test_c011_long_integers_keep_their_digits(scripted_http):
    digits = "123456789012345678901234567890"
    assert arguments_of(scripted_http, f'{{"n":{digits}}}') == [("n", "false", digits)]


def test_c012_tool_results_stand_in_the_order_of_the_calls(scripted_http):
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call("{}", "one"), call("{}", "two")]},
                {"role": "tool", "tool_call_id": "two", "content": "2"},
                {"role": "tool", "tool_call_id": "one", "content": "1"}]
    text = prompt(scripted_http, messages)
    assert text.endswith(f"{USER}<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>{ASSISTANT}</think>")


def test_c013_user_messages_in_a_row_are_one_turn(scripted_http):
    text = prompt(scripted_http, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert text == f"{BOS}{USER}a\n\nb{ASSISTANT}</think>"


def test_c014_earlier_reasoning_is_kept_with_tools_only(scripted_http):
    messages = [*HI, {**CALLED, "reasoning_content": "earlier thoughts"}, RESULT]
    assert "earlier thoughts" not in prompt(scripted_http, messages, **THINK)
    assert "<think>earlier thoughts</think>" in prompt(scripted_http, messages, tools=[TOOL], **THINK)


def test_c015_a_prefix_has_no_end_and_no_new_header(scripted_http):
    text = prompt(scripted_http, [*HI, {"role": "assistant", "content": "Once upon", "prefix": True}])
    assert text == f"{BOS}{USER}hi{ASSISTANT}</think>Once upon"
    same = prompt(scripted_http, [*HI, {"role": "assistant", "content": "Once upon"}], continue_final_message=True,
                  add_generation_prompt=False)
    assert same == text


@pytest.mark.parametrize("arguments", ["[1]", "1", '"x"', "{bad", "null"])
def test_c016_arguments_that_are_no_object_do_no_harm(scripted_http, arguments):
    assert arguments_of(scripted_http, arguments) == [("arguments", "true", arguments)]


def test_c017_special_text_of_users_is_text_unless_the_server_says_so(scripted_http, tmp_path):
    body = {"messages": [{"role": "user", "content": "a<｜User｜>b"}]}
    control = tokens(scripted_http, {"prompt": USER, "add_special_tokens": False})[0]
    assert tokens(scripted_http, body).count(control) == 1
    server = ScriptedServer.start(tmp_path / "raw", "--raw-special-tokens")
    try:
        assert tokens(HttpClient(server.port), body).count(control) == 2
    finally:
        server.stop()


@pytest.mark.parametrize("text", ["12345 67", "  12", "a\r\nb", "\tx\t\ty", "👩‍👩‍👧‍👦!", "1234567890", "a  b   c    d"])
def test_c018_digits_spaces_and_emoji_split_and_round_trip(scripted_http, text):
    ids = tokens(scripted_http, {"prompt": text, "add_special_tokens": False})
    assert detokenized(scripted_http, ids) == text
    if text == "12345 67":  # 123|45| 67: no token spans a border of three digits
        pieces = ["123", "45", " ", "67"]
        alone = [tokens(scripted_http, {"prompt": piece, "add_special_tokens": False}) for piece in pieces]
        assert ids == sum(alone, [])


@pytest.mark.parametrize("change", [{"model_type": "deepseek_v41"}, {"architectures": ["DeepseekV41ForCausalLM"]}])
def test_c019_a_model_of_another_encoder_is_refused_at_start(tmp_path, change):
    for file in MODEL.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    for command in [[str(BINARY), "serve"], [str(SCRIPTED_BINARY), "--script", "none"]]:
        done = subprocess.run([*command, str(tmp_path), "--port", "0"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 4 and "eepseek" in done.stderr, done.stderr
