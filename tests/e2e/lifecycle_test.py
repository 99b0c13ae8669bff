"""Clients that leave, keys, names, shutting down, and starts that cannot succeed."""

import json
import signal
import socket
import subprocess
import threading

import openai
import pytest

from http_client import HttpClient, eventually
from scripted_server import ScriptedServer
from server_process import BINARY, MODEL, ServerProcess

ENDLESS = {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "max_tokens": 10_000}


def is_idle(http: HttpClient) -> bool:
    return (http.metric("vllm:num_requests_running") == 0 and http.metric("vllm:num_requests_waiting") == 0
            and http.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_memory(http, stream):
    assert eventually(lambda: is_idle(http))
    connection = http.begin("/v1/chat/completions", {**ENDLESS, "stream": stream, "n": 2})
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 2)
    assert http.metric("vllm:kv_cache_usage_perc") > 0
    connection.close()
    assert eventually(lambda: is_idle(http), timeout_s=3)
    assert http.chat(max_tokens=1).status == 200


def test_a_client_that_leaves_while_it_waits_is_forgotten(tmp_path):
    server = ServerProcess.serve(tmp_path / "log.txt", "--max-num-seqs", "1")
    http = HttpClient(server.port)
    try:
        first = http.begin("/v1/chat/completions", {**ENDLESS, "stream": True})
        assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)
        second = http.begin("/v1/chat/completions", ENDLESS)
        assert eventually(lambda: http.metric("vllm:num_requests_waiting") == 1)
        second.close()
        assert eventually(lambda: http.metric("vllm:num_requests_waiting") == 0, timeout_s=3)
        assert http.metric("vllm:num_requests_running") == 1
        first.close()
        assert eventually(lambda: is_idle(http), timeout_s=3)
    finally:
        server.stop()


def test_an_engine_that_fails_ends_its_requests_and_the_process(tmp_path):
    server = ScriptedServer.start(tmp_path / "scripted")
    http = HttpClient(server.port)
    try:
        server.rules([{"say": "Once upon a time", "step_ms": 20},
                      {"when": "fall", "fail": "the third layer fell over"}])
        running = http.begin("/v1/chat/completions", {**ENDLESS, "stream": True})
        assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)
        assert http.chat(messages=[{"role": "user", "content": "fall"}]).status == 500
        assert http.get("/health").status == 503
        with running.makefile() as lines:
            events = [line for line in lines if line.startswith("data: ")]
        assert any('"error"' in event for event in events[-2:])
        assert server.process.wait(20) == 1
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("scripted_server: ") and "the third layer fell over" in last
    finally:
        server.stop()


def test_a_full_queue_says_try_again(tmp_path):
    server = ServerProcess.serve(tmp_path / "log.txt", "--max-num-seqs", "1", "--max-queue", "2")
    http = HttpClient(server.port)
    waiting = []
    try:
        for _ in range(8):
            waiting.append(http.begin("/v1/chat/completions", {**ENDLESS, "stream": True}))
        assert eventually(lambda: http.chat(max_tokens=1).status == 429)
        refused = http.chat(max_tokens=1)
        assert refused.status == 429 and refused.headers["retry-after"]
        for connection in waiting:
            connection.close()
        assert eventually(lambda: http.chat(max_tokens=1).status == 200)
    finally:
        server.stop()


def test_keys_names_and_defaults(tmp_path):
    server = ServerProcess.serve(tmp_path / "log.txt", "--api-key", "one", "two", "--served-model-name", "a", "b",
                                 "--default-chat-template-kwargs.thinking=true")
    try:
        for key in ["one", "two"]:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
            assert [model.id for model in client.models.list()] == ["a", "b"]
        wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="three", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as refused:
            wrong.models.list()
        assert refused.value.code == "invalid_api_key"
        http = HttpClient(server.port)
        assert http.get("/health").status == 200
        assert http.get("/metrics").status == 401
        assert http.get("/metrics", **{"x-api-key": "one"}).status == 200
        answer = client.chat.completions.create(model="b", messages=ENDLESS["messages"], max_tokens=8)
        assert answer.model == "b" and answer.choices[0].message.reasoning
    finally:
        server.stop()
    assert "three" not in server.log.read_text() and "two" not in server.log.read_text()


def test_sigterm_lets_running_answers_finish(tmp_path):
    server = ServerProcess.serve(tmp_path / "log.txt")
    http = HttpClient(server.port)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(http.chat(ignore_eos=True, max_tokens=200)))
    asking.start()
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert answers[0].status == 200 and answers[0].json["usage"]["completion_tokens"] == 200
    assert server.process.wait(30) == 0


def test_sigterm_ends_what_outlasts_the_drain(tmp_path):
    server = ServerProcess.serve(tmp_path / "log.txt", "--drain-timeout", "1")
    http = HttpClient(server.port)
    connection = http.begin("/v1/chat/completions", {**ENDLESS, "stream": True})
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    received = b""
    while data := connection.recv(65536):
        received += data
    events = [line for line in received.decode().split("\n") if line.startswith("data: ")]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert events[-1] == "data: [DONE]"
    assert server.process.wait(30) == 0


def failed_start(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([str(BINARY), "serve", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_port_in_use_is_named_with_the_remedy(server):
    code, log = failed_start(str(MODEL), "--port", str(server.port))
    assert code == 2
    last = log.strip().splitlines()[-1]
    assert f"127.0.0.1:{server.port}" in last and "already in use" in last and "--port" in last


def test_a_port_without_permission_or_address_is_named(server):
    code, log = failed_start(str(MODEL), "--host", "192.0.2.1", "--port", "0")
    assert code == 2 and "does not have that address" in log.strip().splitlines()[-1]


def test_the_port_is_told_when_the_system_chose_it(tmp_path):
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen([str(BINARY), "serve", str(MODEL), "--port", "0"], stderr=log)
    try:
        def told() -> str:
            return (tmp_path / "log.txt").read_text()

        assert eventually(lambda: "listening on http://127.0.0.1:" in told(), timeout_s=60)
        port = int(told().split("listening on http://127.0.0.1:")[1].split()[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
    finally:
        process.terminate()
        assert process.wait(30) == 0
