"""Conformance cases 51 to 106: the OpenAI endpoints, asked by the official client wherever it can say it."""

import concurrent.futures
import json
import resource
import signal
import socket
import threading

import openai
import pytest

from http_client import HttpClient, eventually
from scripted_server import ScriptedServer

ASK = [{"role": "user", "content": "go"}]
CHAT = {"messages": ASK}
THINK = {"thinking": {"type": "enabled"}}
ENDLESS = {"messages": ASK, "ignore_eos": True, "max_tokens": 100_000}


@pytest.fixture
def chat(scripted, official_chat):
    """Says a text and gives the answer to a chat with these fields."""
    def ask(text="Hello there.", **fields):
        scripted.say(text)
        return official_chat(**{**CHAT, **fields})
    return ask


@pytest.fixture
def refused(chat):
    def check(param, **fields):
        answer = chat(**fields)
        assert answer.status == 400, answer.text
        assert answer.error["type"] == "invalid_request_error" and answer.error["param"] == param
        assert answer.error["message"] and "\n" not in answer.error["message"]
        return answer.error
    return check


def exchange(port, data, timeout=60):
    """Sends bytes on a connection of its own; what came until the server closed or fell silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(data)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
        except TimeoutError:
            pass
        return received


def is_idle(http):
    return all(http.metric(name) == 0 for name in
               ["vllm:num_requests_running", "vllm:num_requests_waiting"])


def test_c051_models_are_listed_with_their_length(scripted_openai):
    models = scripted_openai.models.list()
    assert models.object == "list" and [card.id for card in models.data] == ["scripted"]
    card = models.data[0]
    assert card.object == "model" and card.max_model_len == 131072 and card.root and card.created
    assert scripted_openai.models.retrieve("scripted").id == "scripted"


def test_c052_an_unknown_model_is_404(scripted_openai):
    with pytest.raises(openai.NotFoundError) as missing:
        scripted_openai.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found" and "gpt-4" in missing.value.message
    with pytest.raises(openai.NotFoundError):
        scripted_openai.models.retrieve("gpt-4")


def test_c053_bad_json_is_400_and_the_connection_goes_on(scripted):
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{bad json")
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_json"' in answer
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_c054_an_empty_body_is_400(scripted_http):
    for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]:
        answer = scripted_http.post(path, b"")
        assert answer.status == 400 and "empty" in answer.error["message"]


def test_c055_a_body_over_the_limit_is_refused_unread(tmp_path):
    server = ScriptedServer.start(tmp_path, "--max-body-bytes", "1M")
    try:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        by_length = exchange(server.port, head + b"Content-Length: 1048577\r\n\r\n")
        assert by_length.startswith(b"HTTP/1.1 413 ") and b"Connection: close" in by_length
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(17):
                connection.sendall(chunk)
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    finally:
        server.stop()


def test_c056_chunked_uploads_and_expect_continue(scripted):
    body = json.dumps({**CHAT, "max_tokens": 3}).encode()
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                           b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for part in (body[:7], body[7:]):
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("fields", [{"messages": []}, {"messages": None}, {"messages": "hi"}, {"messages": {}}])
def test_c057_missing_messages_are_400(refused, fields):
    refused("messages", **fields)


def test_c058_null_content(scripted, scripted_http, refused):
    refused("messages[0].content", messages=[{"role": "user", "content": None}])
    scripted.say("ok")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for turn in [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": None}]:
        assert scripted_http.post("/v1/chat/completions", {"messages": [*ASK, turn, *ASK]}).status == 200


def test_c059_images_are_refused_by_name(refused):
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    error = refused("messages[0].content[0]", messages=[{"role": "user", "content": [part]}])
    assert "image content is not supported" in error["message"]


@pytest.mark.parametrize("part", [{"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}},
                                  {"type": "hologram"}, {}, 5])
def test_c060_other_parts_are_refused(refused, part):
    refused("messages[0].content[0]", messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-1, 0, 1.5, "5", True, 1e300])
def test_c061_bad_lengths_are_400(refused, name, value):
    refused(name, **{name: value})


def test_c062_max_completion_tokens_wins(chat):
    answer = chat("one two three four five six", max_tokens=5, max_completion_tokens=3).json
    assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", [-0.1, 2.1, "1", [1], {}])
def test_c063_bad_temperatures_are_400(refused, value):
    refused("temperature", temperature=value)


def test_c063_nan_is_no_json(scripted_http):
    for number in [b"NaN", b"Infinity", b"1e99999"]:
        answer = scripted_http.post("/v1/chat/completions",
                                    b'{"messages":[{"role":"user","content":"x"}],"temperature":%s}' % number)
        assert answer.status == 400, answer.text


def test_c063_zero_is_greedy(client, model):
    texts = {client.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=8)
             .choices[0].message.content for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("name,value", [("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1),
                                        ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
                                        ("repetition_penalty", 0), ("min_tokens", -1), ("seed", "x")])
def test_c064_bad_sampling_fields_are_400(refused, name, value):
    refused(name, **{name: value})


def test_c065_several_choices_in_one_stream(scripted, scripted_openai, refused):
    scripted.say("one two three")
    stream = scripted_openai.chat.completions.create(model="scripted", messages=ASK, n=2, stream=True)
    texts, finished = {0: "", 1: ""}, []
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in finished
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.append(choice.index)
    assert texts == {0: "one two three", 1: "one two three"} and sorted(finished) == [0, 1]
    refused("n", n=0)
    refused("n", n=65)


def test_c065_one_done_ends_a_stream(scripted, scripted_http):
    scripted.say("one")
    answer = scripted_http.chat(n=2, stream=True)
    assert answer.text.count("data: [DONE]\n\n") == 1 and answer.text.endswith("data: [DONE]\n\n")


def test_c066_a_prompt_over_the_context_is_refused_in_the_known_words(scripted_http):
    body = {"messages": [{"role": "user", "content": "word " * 140_000}], "max_tokens": 7}
    count = scripted_http.post("/tokenize", {"messages": body["messages"]}).json["count"]
    answer = scripted_http.post("/v1/chat/completions", body)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == "messages"
    assert answer.error["message"] == (
        f"This model's maximum context length is 131072 tokens. However, you requested {count + 7} tokens "
        f"({count} in the messages, 7 in the completion). Please reduce the length of the messages or completion.")


def test_c067_only_the_sum_over_the_context_is_clamped(tmp_path):
    server = ScriptedServer.start(tmp_path, "--max-model-len", "64")
    try:
        http = HttpClient(server.port)
        server.say("word " * 100)
        prompt = http.post("/tokenize", CHAT).json["count"]
        answer = http.post("/v1/chat/completions", {**CHAT, "max_tokens": 32_000}).json
        assert answer["usage"]["completion_tokens"] == 64 - prompt
        assert answer["choices"][0]["finish_reason"] == "length"
    finally:
        server.stop()


def test_c068_stream_options_need_a_stream(refused):
    refused("stream_options", stream_options={"include_usage": True})
    refused("stream_options", stream_options={"include_usage": True}, stream=False)


def test_c069_usage_comes_in_a_chunk_of_its_own(scripted, scripted_openai):
    scripted.say("one two")
    chunks = list(scripted_openai.chat.completions.create(model="scripted", messages=ASK, stream=True,
                                                          stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])


def test_c070_running_usage_in_every_chunk(scripted, scripted_http):
    scripted.say("one two three four")
    chunks = scripted_http.chat_chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] > 3


def test_c071_a_second_equal_request_hits_the_cache(scripted, scripted_openai):
    scripted.say("ok")
    messages = [{"role": "user", "content": "some words to remember " * 400}]
    first, second = (scripted_openai.chat.completions.create(model="scripted", messages=messages).usage
                     for _ in range(2))
    # A beginning that other tests' prompts share may be found, too.
    assert first.prompt_tokens_details.cached_tokens < 256 <= second.prompt_tokens_details.cached_tokens
    for usage in (first, second):
        assert usage.prompt_cache_hit_tokens == usage.prompt_tokens_details.cached_tokens
        assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens


def test_c072_reasoning_tokens_are_counted(scripted, scripted_openai):
    scripted.say("some thoughts first</think>A")
    usage = scripted_openai.chat.completions.create(model="scripted", messages=ASK, extra_body=THINK).usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_c073_logprobs_show_alternatives_and_bytes(scripted, scripted_openai):
    scripted.say("naïve 🦩 words")
    choice = scripted_openai.chat.completions.create(model="scripted", messages=ASK, logprobs=True,
                                                     top_logprobs=5).choices[0]
    entries = choice.logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 5 and -9999 <= entry.logprob <= 0
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_c074_logprobs_have_a_limit_and_a_switch(refused):
    refused("top_logprobs", logprobs=True, top_logprobs=21)
    refused("top_logprobs", top_logprobs=5)


def test_c075_ignore_eos_gives_exactly_max_tokens(chat):
    answer = chat("short", ignore_eos=True, max_tokens=50).json
    assert answer["usage"]["completion_tokens"] == 50 and answer["choices"][0]["finish_reason"] == "length"


def test_c076_min_tokens_outlast_an_early_end(chat):
    # The model has no other wish than to end: without a temperature it is always the same one.
    assert chat("a", min_tokens=10, max_tokens=20, temperature=0).json["usage"]["completion_tokens"] >= 10


def test_c077_the_same_seed_gives_the_same_text(client, model):
    texts = {client.chat.completions.create(model=model, messages=ASK, seed=7, temperature=1, max_tokens=24)
             .choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_c078_logit_bias_bans_a_token(chat, scripted_http, refused):
    ids = chat("Hello", return_token_ids=True).json["choices"][0]["token_ids"]
    banned = chat("Hello", return_token_ids=True, logit_bias={str(ids[0]): -100}, max_tokens=3).json
    assert ids[0] not in banned["choices"][0]["token_ids"]
    for bias in [{"999999999": 1}, {"-1": 1}, {"x": 1}, {"1": 101}, {"1": "2"}, {"1": None}, [1]]:
        refused("logit_bias", logit_bias=bias)


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def test_c079_answers_follow_a_json_schema(chat, refused):
    for text in ['{"a": "x"}', "Something else."]:
        answer = chat(text, response_format=json_schema(SCHEMA), max_tokens=1000).json["choices"][0]
        assert json.loads(answer["message"]["content"]) == {"a": "x"} and answer["finish_reason"] == "stop"
    for schema in [{"type": "nonsense"}, {"type": 5}, "x", {"$ref": "#/nowhere"}]:
        assert chat(response_format=json_schema(schema)).status == 400, schema


def test_c080_a_form_holds_for_the_content_not_for_the_reasoning(chat):
    message = chat('Let me think: {"not json</think>{"a": "x"}', response_format={"type": "json_object"}, max_tokens=1000,
                   **THINK).json["choices"][0]["message"]
    assert message["reasoning_content"] == 'Let me think: {"not json' and json.loads(message["content"]) == {"a": "x"}


def test_c081_two_forms_are_refused(chat):
    for fields in [{"structured_outputs": {"regex": "a", "choice": ["b"]}}, {"structured_outputs": {}},
                   {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}]:
        answer = chat(**fields)
        assert answer.status == 400 and answer.error["message"], fields


def test_c082_token_ids_decode_to_the_content(scripted, scripted_http):
    scripted.say("one two three")
    choice = scripted_http.chat(return_token_ids=True).json["choices"][0]
    text = scripted_http.post("/detokenize", {"tokens": choice["token_ids"]}).json["prompt"]
    assert text.removesuffix("<｜end▁of▁sentence｜>") == choice["message"]["content"] == "one two three"
    chunks = scripted_http.chat_chunks(return_token_ids=True)
    has_prompt = ["prompt_token_ids" in chunk or "prompt_token_ids" in chunk["choices"][0] for chunk in chunks]
    assert has_prompt == [True] + [False] * (len(chunks) - 1)
    assert sum((chunk["choices"][0].get("token_ids", []) for chunk in chunks), []) == choice["token_ids"]


def test_c083_salts_do_not_share_a_cache(scripted, scripted_http, refused):
    scripted.say("ok")
    messages = [{"role": "user", "content": "words that two tenants have in common " * 300}]

    def cached(**fields):
        answer = scripted_http.post("/v1/chat/completions", {"messages": messages, **fields})
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="A") == 0
    assert cached(cache_salt="B") == 0
    assert cached(cache_salt="A") > 0
    assert cached(cache_salt="Z3V2bmV3aGxza3ZubGFoZ3Zud3V3ZWZ2bmd0b3V2bnZmc2xpZ3RoZ2x2aQ/+==") == 0
    for salt in ["", "x" * 1025, 5]:
        refused("cache_salt", cache_salt=salt)


def test_c084_priority_needs_its_scheduler(refused, chat):
    refused("priority", priority=5)
    assert chat(priority=0).status == 200


def test_c085_transfer_parameters_need_a_transfer_role(refused):
    assert "transfer role" in refused("kv_transfer_params", kv_transfer_params={"do_remote_decode": True})["message"]


def test_c086_continuing_excludes_a_new_header(refused):
    refused("continue_final_message", continue_final_message=True, add_generation_prompt=True,
            messages=[*ASK, {"role": "assistant", "content": "x"}])


def test_c087_thinking_disabled_has_no_reasoning_field(chat, scripted_http):
    message = chat("A", thinking={"type": "disabled"}).json["choices"][0]["message"]
    assert message["content"] == "A" and "reasoning_content" not in message and "reasoning" not in message
    ids = scripted_http.post("/tokenize", {**CHAT, "thinking": {"type": "disabled"}}).json["tokens"]
    assert scripted_http.post("/detokenize", {"tokens": ids}).json["prompt"].endswith("</think>")


@pytest.mark.parametrize("value", [{"type": "bogus"}, {}, "enabled", {"type": 1}])
def test_c088_unknown_thinking_types_are_400(refused, value):
    refused("thinking", thinking=value)


def test_c089_efforts(scripted_http, refused):
    def text(effort):
        ids = scripted_http.post("/tokenize", {**CHAT, "reasoning_effort": effort}).json["tokens"]
        return scripted_http.post("/detokenize", {"tokens": ids}).json["prompt"]

    assert text("none").endswith("</think>") and "Reasoning Effort" not in text("none")
    for effort in ["minimal", "low", "medium", "high", "xhigh", "max", "ultra"]:
        assert text(effort).endswith("<think>")
    assert "Reasoning Effort" not in text("low") and "Reasoning Effort" in text("max")
    assert text("max") == text("ultra") and text("minimal") == text("low")
    refused("reasoning_effort", reasoning_effort="banana")


def test_c090_templates_are_refused(refused):
    refused("chat_template", chat_template="{{ messages }}")


def test_c091_roles(refused, chat):
    for role in ["function", "foo", "", None, 5]:
        refused("messages[0].role", messages=[{"role": role, "content": "x"}])
    assert chat(messages=[{"role": "developer", "content": "x"}, *ASK]).status == 200


def test_c092_unknown_fields_are_ignored(chat):
    assert chat(my_own_field={"x": [1]}, store=True, metadata={"a": "b"}, service_tier="auto", user="u",
                vllm_xargs={}, documents=[], spaces_between_special_tokens=False).status == 200


@pytest.fixture
def slow(tmp_path):
    """A server whose every step takes 5 ms (an endless answer takes minutes), and its client."""
    server = ScriptedServer.start(tmp_path, "--max-num-seqs", "4", "--max-queue", "4")
    server.say("word " * 2000, step_ms=5)
    yield server, HttpClient(server.port)
    server.stop()


def test_c093_a_client_that_leaves_ends_its_sequence_only(slow):
    server, http = slow
    stays = http.begin("/v1/chat/completions", {**ENDLESS, "stream": True})
    leaves = http.begin("/v1/chat/completions", {**ENDLESS, "stream": True})
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 2)
    assert leaves.recv(65536)
    leaves.close()
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)  # of itself it would run on for minutes
    assert stays.recv(65536)
    stays.close()
    assert eventually(lambda: is_idle(http))


@pytest.mark.parametrize("stream", [True, False])
def test_c094_a_client_that_leaves_while_queued_is_removed(slow, stream):
    server, http = slow
    running = [http.begin("/v1/chat/completions", {**ENDLESS, "stream": True}) for _ in range(4)]
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 4)
    queued = http.begin("/v1/chat/completions", {**ENDLESS, "stream": stream})
    assert eventually(lambda: http.metric("vllm:num_requests_waiting") == 1)
    queued.close()
    assert eventually(lambda: http.metric("vllm:num_requests_waiting") == 0)
    assert http.metric("vllm:num_requests_running") == 4
    for connection in running:
        connection.close()
    assert eventually(lambda: is_idle(http))


def test_c094_a_client_that_leaves_a_whole_answer_is_removed(slow):
    server, http = slow
    connection = http.begin("/v1/chat/completions", ENDLESS)
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)
    connection.close()
    assert eventually(lambda: is_idle(http))


def test_c095_a_slow_reader_is_cut_and_blocks_nobody(tmp_path):
    server = ScriptedServer.start(tmp_path, "--max-write-buffer-bytes", "64k")
    try:
        http = HttpClient(server.port)
        server.say("word " * 2000)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            body = json.dumps({**ENDLESS, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
            reader.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))
            assert http.chat(max_tokens=5).status == 200  # whether the reader was cut already or not
            assert eventually(lambda: http.metric("vllm:request_success_total", finished_reason="abort") == 1)
    finally:
        server.stop()


def test_c096_ten_thousand_idle_connections(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 500)
    if count < 3000:
        pytest.skip("so few open files tell nothing: ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = ScriptedServer.start(tmp_path)
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connections[-1].recv(1000).startswith(b"HTTP/1.1 200 ")
        assert HttpClient(server.port).get("/health").status == 200
    finally:
        for connection in connections:
            connection.close()
        server.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_c097_sigterm_lets_answers_finish_and_refuses_new_ones(slow):
    server, http = slow
    idle = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    body = json.dumps(CHAT).encode()
    late = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    idle.sendall(late)  # its body comes when the server has been told to stop
    tell = server.say_when_told("the last words")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(http.chat()))
    asking.start()
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: http.get("/health/ready").status == 503)
    idle.sendall(body)
    refused = idle.recv(65536)
    assert refused.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in refused
    tell()
    asking.join(60)
    assert answers[0].status == 200 and answers[0].json["choices"][0]["message"]["content"] == "the last words"
    assert server.ended() == 0


def test_c098_a_full_queue_is_429(slow):
    server, http = slow
    connections = [http.begin("/v1/chat/completions", {**ENDLESS, "stream": True}) for _ in range(8)]
    assert eventually(lambda: http.metric("vllm:num_requests_running") + http.metric("vllm:num_requests_waiting") == 8)
    with pytest.raises(openai.RateLimitError) as full:
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0).chat.completions.create(
            model="scripted", messages=ASK)
    assert int(full.value.response.headers["retry-after"]) > 0
    for connection in connections:
        connection.close()
    assert eventually(lambda: is_idle(http))


def test_c099_keys(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# the team's keys\nfirst-key\n\n  second-key  \n")
    server = ScriptedServer.start(tmp_path / "server", "--api-key", "third-key", "--api-key-file", str(keys))
    try:
        http = HttpClient(server.port)
        for key in ["first-key", "second-key", "third-key"]:
            assert http.get("/v1/models", Authorization=f"Bearer {key}").status == 200
            assert http.get("/v1/models", **{"x-api-key": key}).status == 200
        for headers in [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"Authorization": "first-key"},
                        {"Authorization": "Bearer first-ke"}, {"Authorization": "Bearer # the team's keys"},
                        {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong", "x-api-key": "first-key"}]:
            answer = http.get("/v1/models", **headers)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key", headers
        assert http.post("/v1/chat/completions", b"{bad").status == 401
        assert http.get("/metrics").status == 401 and http.get("/nowhere").status == 401
        assert http.get("/health").status == 200
    finally:
        server.stop()
    assert not any(f"{n}-key" in server.log.read_text() for n in ("first", "second", "third"))


def test_c100_wrong_methods_and_paths(scripted_http):
    wrong = scripted_http.get("/v1/chat/completions")
    assert wrong.status == 405 and "POST" in wrong.headers["allow"] and wrong.error["message"]
    assert scripted_http.request("DELETE", "/v1/models").status == 405
    unknown = scripted_http.get("/v1/nowhere")
    assert unknown.status == 404 and unknown.error["type"] == "invalid_request_error"
    options = scripted_http.request("OPTIONS", "/v1/chat/completions")
    assert options.status == 204 and "access-control-allow-origin" not in options.headers


def test_c101_completions_take_text_ids_and_lists_of_both(scripted, scripted_openai, scripted_http):
    scripted.say(" and so on")
    ids = scripted_http.post("/tokenize", {"prompt": "Once"}).json["tokens"]
    for prompt, num_prompts in [("Once", 1), (["Once", "Twice"], 2), (ids, 1), ([ids, ids], 2)]:
        answer = scripted_openai.completions.create(model="scripted", prompt=prompt, n=2)
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        assert {choice.text for choice in answer.choices} == {" and so on"}
    assert scripted_openai.completions.create(model="scripted", prompt="").choices[0].text == " and so on"


def test_c101_echo_with_logprobs(scripted, scripted_openai):
    scripted.say(" on")
    choice = scripted_openai.completions.create(model="scripted", prompt="Once upon", echo=True, logprobs=2).choices[0]
    assert choice.text == "Once upon on"
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)


def test_c101_fill_in_the_middle(scripted, scripted_http):
    scripted.rules([{"say": "wrong"}, {"when": "<｜fim▁begin｜>def f():<｜fim▁hole｜>    return x<｜fim▁end｜>",
                                       "say": "    x = 1\n"}])
    for path in ["/v1/completions", "/beta/completions"]:
        answer = scripted_http.post(path, {"prompt": "def f():", "suffix": "    return x"})
        assert answer.json["choices"][0]["text"] == "    x = 1\n"


def test_c101_completions_stream(scripted, scripted_openai):
    scripted.say(" one two")
    stream = scripted_openai.completions.create(model="scripted", prompt=["a", "b"], stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: " one two", 1: " one two"}


def test_c102_ids_outside_the_vocabulary_are_400(scripted_http):
    for prompt in [[129280], [-1], [[1, 129280]], [1.5], [2**40], ["x", 5], [], [[]], None, {}]:
        answer = scripted_http.post("/v1/completions", {"prompt": prompt})
        assert answer.status == 400 and answer.error["param"] == "prompt", answer.text


@pytest.mark.parametrize("text", [b"\\ud83d", b"\\udc00x", b"\\ud83d\\u0041", b"\xff", b"\xc0\x80", b"\xed\xa0\xbd"])
def test_c103_what_is_no_unicode_is_400(scripted_http, text):
    for path, body in [("/v1/chat/completions", b'{"messages":[{"role":"user","content":"%s"}]}'),
                       ("/v1/completions", b'{"prompt":"%s"}'), ("/tokenize", b'{"%s":1}')]:
        answer = scripted_http.post(path, body % text)
        assert answer.status == 400, answer.text


@pytest.mark.parametrize("text", ["a" * (1 << 20), " " * (1 << 20), "1" * (1 << 20), "é" * (1 << 19)])
def test_c104_a_mebibyte_of_one_character_takes_linear_time(scripted_http, text):
    assert scripted_http.post("/tokenize", {"prompt": text}).status == 200  # quadratic time would be hours


@pytest.mark.parametrize("body", [b"[" * 10_000, b'{"a":' * 10_000, b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}"])
def test_c105_deep_json_is_400(scripted_http, body):
    assert scripted_http.post("/v1/chat/completions", body).status == 400


def test_c106_assistant_messages_in_a_row_are_one_turn(scripted_http):
    messages = [*ASK, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, *ASK]
    one = [*ASK, {"role": "assistant", "content": "ab"}, *ASK]
    ids = [scripted_http.post("/tokenize", {"messages": m}).json["tokens"] for m in (messages, one)]
    assert ids[0] == ids[1]


def test_many_clients_at_once_get_their_own_answers(scripted, scripted_openai):
    scripted.rules([{"when": f"number {i};", "say": f"answer {i}"} for i in range(32)])

    def ask(i):
        return scripted_openai.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": f"number {i};"}]).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(32))) == [f"answer {i}" for i in range(32)]
