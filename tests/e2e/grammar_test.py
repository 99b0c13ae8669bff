"""Answers held to a form, by the official client over a real socket and the built-in model.

Forms that end after a few tokens are drawn at high temperatures; reasoning, which may go on for ever, is greedy.
"""

import json
import random
import re

import openai
import pytest

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30},
                       "days": {"type": "integer", "minimum": 0, "maximum": 9999},
                       "unit": {"enum": ["C", "F"]}},
        "required": ["city", "days"]}}}
    for name in ("weather", "clock")
]  # fmt: skip

HEAT = {"disabled": 1.4, "enabled": 0}


def chat(client, model, **fields):
    messages = [{"role": "user", "content": "Tell me about the weather in Paris."}]
    fields.setdefault("max_tokens", 2000)
    return client.chat.completions.create(model=model, messages=messages, **fields).choices[0]


def random_schema(rng, depth=0):
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "null"] + ["object", "array"] * (depth < 2))
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, None, True], rng.randint(1, 3))}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 12)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 900)}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(1, 3)}
    if kind == "object":
        names = rng.sample(["a", "b", "name", "größe"], rng.randint(1, 3))
        return {"type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names},
                "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False}
    return {"type": kind}


def fits(value, schema):
    if "enum" in schema:
        return any(value == v and type(value) is type(v) for v in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        names = schema["properties"]
        return (isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(names)
                and all(fits(value[n], names[n]) for n in value))
    if kind == "array":
        return (isinstance(value, list) and len(value) <= schema["maxItems"]
                and all(fits(v, schema["items"]) for v in value))
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "number":
        return type(value) in (int, float)
    return value is None if kind == "null" else type(value) is bool


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_follows_a_random_json_schema(client, model, seed):
    rng = random.Random(seed)
    schema = {"type": "object", "properties": {"x": random_schema(rng), "y": random_schema(rng)},
              "required": ["x", "y"], "additionalProperties": False}
    choice = chat(client, model, temperature=1.3, seed=seed, max_tokens=900,
                  response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    if choice.finish_reason == "length":  # a free number may go on and on
        return
    assert choice.finish_reason == "stop"
    value = json.loads(choice.message.content)
    assert set(value) == {"x", "y"}
    assert all(fits(value[name], schema["properties"][name]) for name in value), choice.message.content


def test_json_in_thinking_mode_comes_after_free_reasoning(client, model):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}}, "required": ["n"]}
    choice = chat(client, model, temperature=0, extra_body={"thinking": {"type": "enabled"}},
                  response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert choice.message.reasoning_content
    assert isinstance(json.loads(choice.message.content)["n"], int)


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_legal(client, model, thinking, seed):
    choice = chat(client, model, tools=TOOLS, tool_choice="required", temperature=HEAT[thinking], seed=seed,
                  extra_body={"thinking": {"type": thinking}})
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    for call in choice.message.tool_calls:
        assert call.function.name in ("weather", "clock")
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
        assert set(arguments) <= {"city", "days", "unit"}


def test_a_named_tool_is_called_once(client, model):
    choice = chat(client, model, tools=TOOLS,
                  tool_choice={"type": "function", "function": {"name": "clock"}})
    assert [call.function.name for call in choice.message.tool_calls] == ["clock"]


def test_one_call_where_parallel_calls_are_off(client, model):
    choice = chat(client, model, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1.5)
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("fields,pattern", [
    ({"structured_outputs": {"regex": r"[A-Z]{2}-\d{3}"}}, r"[A-Z]{2}-\d{3}"),
    ({"structured_outputs": {"choice": ["red", "dark blue"]}}, "red|dark blue"),
    ({"structured_outputs": {"grammar": 'root ::= "(" [a-z]{1,5} ")"'}}, r"\([a-z]{1,5}\)"),
    ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
    ({"guided_regex": "a{2,4}"}, "a{2,4}"),
    ({"guided_choice": ["x"]}, "x"),
])  # fmt: skip
def test_structured_outputs_hold_chats_and_completions(client, model, fields, pattern):
    assert re.fullmatch(pattern, chat(client, model, extra_body=fields, max_tokens=60).message.content)
    answer = client.completions.create(model=model, prompt="It is", max_tokens=60, extra_body=fields)
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
def test_choices_that_are_streamed_follow_the_form_each_for_itself(client, model, thinking):
    schema = {"type": "object", "required": ["n", "s"], "additionalProperties": False,
              "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}, "s": {"enum": ["a", "bc"]}}}
    contents = ["", "", "", ""]
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Any values."}], n=4, stream=True, temperature=HEAT[thinking],
        seed=3, max_tokens=2000, extra_body={"thinking": {"type": thinking}},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    finished = []
    for chunk in stream:
        for choice in chunk.choices:
            contents[choice.index] += choice.delta.content or ""
            finished += [choice.finish_reason] if choice.finish_reason else []
    assert finished == ["stop"] * 4
    for content in contents:
        assert fits(json.loads(content), schema), content
    assert len(set(contents)) > 1 or thinking == "enabled"


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
def test_required_calls_that_are_streamed_are_legal_in_every_choice(client, model, thinking):
    calls = [{}, {}, {}]
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Weather in Rome and Oslo."}], n=3, stream=True,
        temperature=HEAT[thinking], seed=5, max_tokens=2000, tools=TOOLS, tool_choice="required",
        extra_body={"thinking": {"type": thinking}})
    finished = []
    for chunk in stream:
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                call = calls[choice.index].setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
            assert not choice.delta.content
            finished += [choice.finish_reason] if choice.finish_reason else []
    assert finished == ["tool_calls"] * 3
    for choice in calls:
        assert choice
        for name, arguments in choice.values():
            arguments = json.loads(arguments)
            assert name in ("weather", "clock") and set(arguments) <= {"city", "days", "unit"}
            assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)


@pytest.mark.parametrize("fields,words", [
    ({"structured_outputs": {"regex": "*abc"}}, "cannot be compiled"),
    ({"structured_outputs": {"regex": "(" * 100 + "a" + ")" * 100}}, "nest at most 64"),
    ({"structured_outputs": {"json": {"type": "string", "maxLength": 1_000_000_000}}}, "maxLength"),
    ({"structured_outputs": {"json": {"enum": list(range(100_000))}}}, "at most 65536 bytes"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' is not supported"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "allows no answer"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "send one of them"),
])  # fmt: skip
def test_a_form_that_cannot_be_held_is_refused(client, model, fields, words):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, model, extra_body=fields)
    assert words in refused.value.body["message"]
