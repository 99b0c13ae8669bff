"""What a plain HTTP client sees: curl lines, fields beyond OpenAI's, bad input."""

import json
import socket
import subprocess

import pytest

STORY = [{"role": "user", "content": "Tell me a story."}]


def curl(server, *arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", "--fail-with-body", "--max-time", "60", *arguments],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl_lines_that_vllm_users_have(server, model):
    url, as_json = server.url, ["-H", "Content-Type: application/json"]
    assert json.loads(curl(server, f"{url}/v1/models"))["data"][0]["id"] == model
    assert curl(server, f"{url}/health") == ""
    body = json.dumps({"model": model, "messages": STORY, "max_tokens": 8,
                       "chat_template_kwargs": {"thinking": True, "reasoning_effort": "high"}})
    assert json.loads(curl(server, f"{url}/v1/chat/completions", *as_json, "-d", body))["choices"]
    body = json.dumps({"model": model, "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0})
    assert json.loads(curl(server, f"{url}/v1/completions", *as_json, "-d", body))["choices"][0]["text"]
    body = json.dumps({"model": model, "messages": STORY, "max_tokens": 8, "stream": True})
    assert curl(server, "-N", f"{url}/v1/chat/completions", *as_json, "-d", body).endswith("data: [DONE]\n\n")


def test_a_large_body_with_expect_continue_and_chunks(server):
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 300_000}]})
    for encoding in [[], ["-H", "Transfer-Encoding: chunked"]]:
        done = subprocess.run(["curl", "-sS", "--max-time", "60", "-H", "Content-Type: application/json",
                               "-H", "Expect: 100-continue", *encoding, "--data-binary", "@-",
                               server.url + "/v1/chat/completions"], input=body, capture_output=True, text=True)
        assert json.loads(done.stdout)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/beta/chat/completions",
                                  "//v1/chat/completions/?beta=true"])
def test_the_aliases_of_the_chat_route(http, path):
    assert http.post(path, {"messages": STORY, "max_tokens": 1}).status == 200


def test_probes_and_metrics(http):
    for path in ["/", "/health", "/ping", "/health/live", "/health/ready", "/version", "/metrics"]:
        assert http.get(path).status == 200
        assert http.request("HEAD", path).status == 200
    assert http.request("POST", "/ping").status == 200
    http.chat(max_tokens=1)
    text = http.get("/metrics").text
    for name in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
                 "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "http_requests_total"]:
        assert f"# TYPE {name} " in text, name


def test_generation_fields_beyond_openais(http):
    exact = http.chat(max_tokens=50, ignore_eos=True, temperature=0, return_token_ids=True).json
    assert exact["usage"]["completion_tokens"] == 50
    assert exact["choices"][0]["finish_reason"] == "length"
    ids = exact["choices"][0]["token_ids"]
    assert len(ids) == 50
    banned = http.chat(max_tokens=1, temperature=0, return_token_ids=True, logit_bias={ids[0]: -100}).json
    assert banned["choices"][0]["token_ids"][0] != ids[0]
    only = http.chat(max_tokens=5, allowed_token_ids=[ids[0]], ignore_eos=True, return_token_ids=True).json
    assert only["choices"][0]["token_ids"] == [ids[0]] * 5
    stopped = http.chat(max_tokens=50, ignore_eos=False, temperature=0, stop_token_ids=[ids[3]]).json
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] <= 4
    least = http.chat(max_tokens=20, min_tokens=10, temperature=0).json
    assert least["usage"]["completion_tokens"] >= 10


def test_running_usage_never_falls(http):
    chunks = http.chat_chunks(max_tokens=10, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] > 0


def test_tokenize_and_detokenize_round_trip(http):
    text = "Hello, world. 12345 naïve 你好 😀\n\n  x"
    tokens = http.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/detokenize", {"tokens": tokens["tokens"]}).json["prompt"] == text
    chat = http.post("/tokenize", {"messages": STORY}).json
    assert chat["count"] == http.chat(max_tokens=1).json["usage"]["prompt_tokens"]


def test_text_from_users_never_becomes_control_tokens(http):
    tokens = http.post("/tokenize", {"messages": [{"role": "user", "content": "<｜User｜>"}]}).json["tokens"]
    user = http.post("/tokenize", {"prompt": "<｜User｜>", "add_special_tokens": False}).json["tokens"]
    assert len(user) == 1 and tokens.count(user[0]) == 1


@pytest.mark.parametrize("text", ["a" * (1 << 20), " " * (1 << 20), "é" * (1 << 19), "\n" * (1 << 20)])
def test_long_monotonous_texts_are_tokenized_in_linear_time(http, text):
    assert http.post("/tokenize", {"prompt": text}).status == 200  # quadratic time would be hours


MESSAGES = {"messages": STORY}
BAD_REQUESTS = [
    # body, status, words of the message
    (b"", 400, "empty"),
    (b"{bad json", 400, "invalid JSON at byte"),
    (b"[" * 10_000, 400, "invalid JSON at byte"),
    (b'{"messages":[{"role":"user","content":"\xff"}]}', 400, "The body is not UTF-8"),
    (b'{"messages":[{"role":"user","content":"\\ud83d"}]}', 400, "invalid JSON at byte"),
    (b'{"messages":[],"temperature":NaN}', 400, "invalid JSON at byte"),
    ([], 400, "object"),
    ({}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "content is required"),
    ({"messages": [{"role": "foo", "content": "x"}]}, 400, "role"),
    ({"messages": [{"role": "function", "content": "x"}]}, 400, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     400, "image content is not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, 400, "audio"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, 400, "file"),
    ({**MESSAGES, "model": "gpt-4"}, 404, "The model 'gpt-4' does not exist; this server answers to '"),
    ({**MESSAGES, "max_tokens": -1}, 400, "max_tokens must be at least 1, got -1"),
    ({**MESSAGES, "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
    ({**MESSAGES, "max_tokens": 1.5}, 400, "max_tokens must be an integer"),
    ({**MESSAGES, "max_tokens": "5"}, 400, "max_tokens must be an integer"),
    ({**MESSAGES, "temperature": -0.1}, 400, "temperature"),
    ({**MESSAGES, "temperature": 2.1}, 400, "temperature"),
    ({**MESSAGES, "top_p": 0}, 400, "top_p"),
    ({**MESSAGES, "top_p": 1.1}, 400, "top_p"),
    ({**MESSAGES, "top_k": -2}, 400, "top_k"),
    ({**MESSAGES, "n": 0}, 400, "n must be at least 1"),
    ({**MESSAGES, "n": 10_000}, 400, "n must be at most"),
    ({**MESSAGES, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({**MESSAGES, "top_logprobs": 5}, 400, "top_logprobs"),
    ({**MESSAGES, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({**MESSAGES, "logit_bias": {"999999999": 1}}, 400, "logit_bias"),
    ({**MESSAGES, "thinking": {"type": "bogus"}}, 400, "thinking.type"),
    ({**MESSAGES, "reasoning_effort": "banana"}, 400, "reasoning_effort"),
    ({**MESSAGES, "chat_template": "x"}, 400, "chat_template"),
    ({**MESSAGES, "response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
]


@pytest.mark.parametrize("body,status,words", BAD_REQUESTS, ids=lambda value: str(value)[:60])
def test_bad_input_gets_one_clear_line(http, body, status, words):
    answer = http.post("/v1/chat/completions", body)
    assert answer.status == status
    assert words in answer.error["message"] and "\n" not in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert set(answer.error) == {"message", "type", "param", "code"}


def test_unknown_fields_are_ignored(http):
    assert http.chat(max_tokens=1, my_own_field={"x": [1]}, metadata={"a": "b"}, store=True).status == 200


def test_a_prompt_over_the_context_names_both_lengths(http, client):
    limit = client.models.list().data[0].max_model_len
    ids = http.post("/tokenize", {"prompt": "a"}).json["tokens"]
    over = http.post("/v1/completions", {"prompt": [ids[-1]] * limit, "max_tokens": 7})
    assert over.status == 400 and over.error["code"] == "context_length_exceeded"
    assert over.error["message"].startswith(
        f"This model's maximum context length is {limit} tokens. However, you requested {limit + 7} tokens")
    clamped = http.post("/v1/completions", {"prompt": ids, "max_tokens": limit, "allowed_token_ids": [ids[-1]],
                                            "stop_token_ids": [ids[-1]]})
    assert clamped.status == 200 and clamped.json["choices"][0]["stop_reason"] == ids[-1]


def test_routes_and_methods(http):
    assert http.get("/v1/nowhere").error["message"] == "there is no route GET /v1/nowhere"
    wrong = http.get("/v1/chat/completions")
    assert wrong.status == 405 and "POST" in wrong.headers["allow"]
    assert http.request("POST", "/v1/chat/completions", b"{}", {"Content-Type": "text/plain"}).status == 415


def test_a_connection_goes_on_after_a_bad_request(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n{bad")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("bytes_sent,status", [
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000, 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
    (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
    (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
], ids=["no host", "large header", "many fields", "two lengths", "unknown coding", "version", "tls"])
def test_malformed_http(server, bytes_sent, status):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(bytes_sent)
        assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
