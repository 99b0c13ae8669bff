"""Every limit of a request has a flag, and says what it is when it is reached."""

import socket
import subprocess

import pytest

from http_client import HttpClient
from scripted_server import ScriptedServer
from server_process import BINARY, MODEL

ASK = [{"role": "user", "content": "go"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    server = ScriptedServer.start(
        tmp_path_factory.mktemp("narrow"), "--max-messages", "2", "--max-tools", "1", "--max-sequences", "3",
        "--max-logit-bias", "1", "--max-stop-strings", "1", "--max-stop-string-bytes", "4", "--max-bad-words", "1",
        "--max-json-depth", "8", "--max-json-nodes", "100", "--max-logprobs", "2", "--max-header-fields", "10",
        "--max-header-bytes", "1k", "--header-timeout", "1", "--body-timeout", "1", "--min-body-rate", "1M",
        "--idle-timeout", "1")
    yield HttpClient(server.port)
    server.stop()


@pytest.mark.parametrize("param,fields", [
    ("messages", {"messages": ASK * 3}), ("tools", {"tools": [TOOL, TOOL]}), ("n", {"n": 4}),
    ("logit_bias", {"logit_bias": {"1": 1, "2": 2}}), ("stop", {"stop": ["a", "b"]}), ("stop", {"stop": "abcde"}),
    ("bad_words", {"bad_words": ["a", "b"]}), ("top_logprobs", {"logprobs": True, "top_logprobs": 3}),
    (None, {"x": [[[[[[[[1]]]]]]]]}), (None, {"x": list(range(101))}),
], ids=lambda value: str(value)[:40])
def test_limits_of_requests_are_flags(narrow, param, fields):
    answer = narrow.post("/v1/chat/completions", {"messages": ASK, **fields})
    assert answer.status == 400 and answer.error["param"] == param, answer.text
    assert narrow.post("/v1/chat/completions", {"messages": ASK, "n": 3, "max_tokens": 1}).status == 200


def test_limits_of_headers_are_flags(narrow):
    assert narrow.request("GET", "/health", headers={"A": "a" * 1100}).status == 431
    assert narrow.request("GET", "/health", headers={f"A{i}": "a" for i in range(11)}).status == 431
    assert narrow.request("GET", "/health", headers={"A": "a" * 100}).status == 200


@pytest.mark.parametrize("sent,answer", [
    (b"", b""), (b"GET /hea", b"HTTP/1.1 408 "),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 408 ")],
    ids=["idle", "header", "body"])
def test_times_of_connections_are_flags(narrow, sent, answer):
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(65536)[:13] == answer


@pytest.mark.parametrize("flags,words", [
    (["--max-json-depth", "1"], "from 2 to 1000"), (["--max-tools", "x"], "not a number"),
    (["--max-body-bytes", "12x"], "--max-body-bytes"), (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
    (["--idle-timeout", "0"], "--idle-timeout"), (["--api-key", ""], "--api-key: '' says nothing")])
def test_bad_limits_end_the_start(flags, words):
    done = subprocess.run([str(BINARY), "serve", str(MODEL), *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_metrics_may_have_a_port_of_their_own(tmp_path):
    server = ScriptedServer.start(tmp_path, "--metrics-port", "0", "--api-key", "k")
    try:
        line = next(line for line in server.log.read_text().splitlines() if "metrics at http://127.0.0.1:" in line)
        metrics = HttpClient(int(line.split(":")[-1].split("/")[0]))
        assert metrics.metric("vllm:num_requests_running") == 0
        assert metrics.get("/v1/models").status == 404
        assert HttpClient(server.port).get("/metrics", **{"x-api-key": "k"}).status == 404
    finally:
        server.stop()
