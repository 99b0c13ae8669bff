"""Clients that leave, keys, names, shutting down, and starts that cannot succeed."""

import json
import signal
import socket
import subprocess

import openai
import pytest

from http_client import HttpClient, eventually
from scripted_server import ScriptedServer
from server_process import BINARY, MODEL, ServerProcess, free_port

ASK = {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True}
ENDLESS = {**ASK, "max_tokens": 100_000}  # minutes where a step takes 5 ms


def is_idle(http: HttpClient) -> bool:
    return (http.metric("vllm:num_requests_running") == 0 and http.metric("vllm:num_requests_waiting") == 0
            and http.metric("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_memory(scripted, scripted_http, stream):
    http = scripted_http
    assert eventually(lambda: is_idle(http))
    scripted.say("word", step_ms=5)
    connection = http.begin("/v1/chat/completions", {**ENDLESS, "stream": stream, "n": 2})
    assert eventually(lambda: http.metric("vllm:num_requests_running") == 2)
    assert http.metric("vllm:kv_cache_usage_perc") > 0
    connection.close()
    assert eventually(lambda: is_idle(http))
    assert http.chat(max_tokens=1).status == 200


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
        assert server.ended() == 1
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("scripted_server: ") and "the third layer fell over" in last
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
        answer = client.chat.completions.create(model="b", messages=ASK["messages"], max_tokens=8, temperature=0)
        assert answer.model == "b" and answer.choices[0].message.reasoning
    finally:
        server.stop()
    assert "three" not in server.log.read_text() and "two" not in server.log.read_text()


def events_after_sigterm(server: ServerProcess, body: dict) -> list[str]:
    """The data of a stream whose server is told to end when the stream has begun."""
    try:
        with HttpClient(server.port).begin("/v1/chat/completions", {**body, "stream": True}) as connection:
            received = connection.recv(65536)
            server.process.send_signal(signal.SIGTERM)
            while data := connection.recv(65536):
                received += data
        assert server.ended() == 0
    finally:
        server.stop()
    return [line.removeprefix("data: ") for line in received.decode().split("\n") if line.startswith("data: ")]


def test_sigterm_lets_running_answers_finish(tmp_path):
    events = events_after_sigterm(ServerProcess.serve(tmp_path / "log.txt"), {**ASK, "max_tokens": 200})
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length" and events[-1] == "[DONE]"


def test_sigterm_ends_what_outlasts_the_drain(tmp_path):
    server = ScriptedServer.start(tmp_path, "--drain-timeout", "1")
    server.say("word", step_ms=5)
    events = events_after_sigterm(server, ENDLESS)
    assert json.loads(events[-2])["error"]["code"] == "cancelled" and events[-1] == "[DONE]"


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_takes_long_is_ended_by_a_signal(tmp_path, signal_number):
    port = free_port()
    command = [str(BINARY), "serve", str(MODEL), "--port", str(port), "--nnodes", "2", "--node-rank", "0", "--master-addr",
               "127.0.0.1", "--master-port", str(free_port()), "--tensor-parallel-size", "2"]
    waiting = ServerProcess(command, port, tmp_path / "log.txt", {"FATHOM_CLUSTER_SECRET": "x"})
    try:
        assert eventually(lambda: "waits for 1 other" in waiting.log.read_text())
        waiting.process.send_signal(signal_number)
        assert waiting.ended() == 128 + signal_number
    finally:
        waiting.stop()


def failed_start(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([str(BINARY), "serve", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_port_in_use_is_named_with_the_remedy(server):
    code, log = failed_start(str(MODEL), "--port", str(server.port))
    assert code == 2 and log.count("\n") == 1  # before anything is loaded
    assert f"127.0.0.1:{server.port}" in log and "already in use" in log and "--port" in log


def test_a_port_without_permission_or_address_is_named():
    code, log = failed_start(str(MODEL), "--host", "192.0.2.1", "--port", "0")
    assert code == 2 and "does not have that address" in log and log.count("\n") == 1


def test_the_port_is_told_when_the_system_chose_it(tmp_path):
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen([str(BINARY), "serve", str(MODEL), "--port", "0"], stderr=log)
    try:
        def told() -> str:
            return (tmp_path / "log.txt").read_text()

        assert eventually(lambda: "listening on http://127.0.0.1:" in told())
        port = int(told().split("listening on http://127.0.0.1:")[1].split()[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
    finally:
        process.terminate()
        assert process.wait(60) == 0
