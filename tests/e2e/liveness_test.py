"""Signs of life: keep-alives while an answer is made, streams that can be resumed, io threads that nobody holds up."""

import json
import select
import socket

import pytest

from http_client import HttpClient, eventually
from scripted_server import ScriptedServer

ASK = [{"role": "user", "content": "go"}]
ENDLESS = {"messages": ASK, "ignore_eos": True, "max_tokens": 100_000}  # with a step of 5 ms it takes minutes
WORDS = " ".join(f"word{i}" for i in range(60))
RESUMABLE = {"X-Resumable-Stream": "true"}


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A server that gives signs of life every second and keeps streams for five minutes."""
    server = ScriptedServer.start(tmp_path_factory.mktemp("patient"), "--keep-alive-interval", "1",
                                  "--resume-window", "300", "--api-key", "one", "two", "--max-num-seqs", "2",
                                  "--io-threads", "1")
    yield server
    server.stop()


def post(port, body, path="/v1/chat/completions", **headers):
    """A raw request; its socket."""
    data = json.dumps(body).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"x-api-key": "one", **headers}.items())
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{lines}\r\n"
                       .encode() + data)
    return connection


def read_until(connection, words=None):
    received = b""
    while words is None or words not in received:
        more = connection.recv(65536)
        if not more:
            break
        received += more
    return received.decode()


def events_of(text):
    """(id, data) of each event."""
    found = []
    for frame in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id"), fields["data"]))
    return found


def content_of(events):
    """The text of any dialect's stream."""
    text = ""
    for data in (json.loads(data) for _, data in events if data != "[DONE]"):
        for choice in data.get("choices", []):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        text += data.get("delta", {}).get("text", "")
    return text


def test_a_stream_has_comments_during_a_long_prefill(patient):
    tell = patient.say_when_told("ok")
    with post(patient.port, {"messages": ASK, "stream": True}) as connection:
        before = read_until(connection, b": keep-alive\n\n") + read_until(connection, b": keep-alive\n\n")
        tell()
        assert "data: " not in before and read_until(connection).count("[DONE]") == 1


@pytest.mark.parametrize("path,body", [("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "x"})])
def test_a_whole_answer_has_newlines_during_a_long_prefill(patient, path, body):
    tell = patient.say_when_told("ok")
    with post(patient.port, body, path) as connection:
        text = read_until(connection, b"\r\n\r\n1\r\n\n\r\n1\r\n\n\r\n")  # the head, and two chunks of a newline each
        tell()
        text += read_until(connection)
    assert text.startswith("HTTP/1.1 200 ") and "x-request-id: " in text
    choice = json.loads("".join(line for line in text.splitlines() if line.startswith("{")))["choices"][0]
    assert "ok" in (choice.get("text"), choice.get("message", {}).get("content"))


def test_keep_alives_come_to_those_who_wait_in_the_queue(patient):
    patient.say("word", step_ms=20)
    running = [post(patient.port, {**ENDLESS, "stream": True}) for _ in range(2)]
    for connection in running:
        read_until(connection, b"word")
    queued = post(patient.port, {"messages": ASK, "stream": True})
    assert ": keep-alive" in read_until(queued, b": keep-alive")
    for connection in [*running, queued]:
        connection.close()


def test_streams_have_no_ids_unless_asked(patient):
    patient.say("ok")
    assert {event_id for event_id, _ in events_of(read_until(post(patient.port, {"messages": ASK, "stream": True})))} == {None}


@pytest.mark.parametrize("path,body", [("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "x"}),
                                       ("/v1/messages", {"messages": ASK, "max_tokens": 500, "model": "scripted"})])
def test_a_stream_goes_on_after_the_last_event_that_arrived(patient, path, body):
    patient.say(WORDS, step_ms=5)
    first = post(patient.port, {**body, "max_tokens": 500, "stream": True}, path, **RESUMABLE)
    seen = events_of(read_until(first, b"word9"))[:-1]  # the last may be cut
    first.close()
    last_id = seen[-1][0]
    rest = events_of(read_until(post(patient.port, {}, path, **{"Last-Event-ID": last_id})))
    ids = [event_id for event_id, _ in seen + rest]
    stream_id = ids[0].split(".")[0]
    assert ids == [f"{stream_id}.{i}" for i in range(len(ids))]
    assert content_of(seen + rest) == WORDS
    again = events_of(read_until(post(patient.port, {}, path, **{"Last-Event-ID": last_id})))
    assert again == rest  # also after the end


def test_only_its_own_caller_resumes_a_stream(patient):
    patient.say(WORDS, step_ms=5)
    first = post(patient.port, {"messages": ASK, "stream": True}, **RESUMABLE)
    last_id = events_of(read_until(first, b"word3"))[0][0]
    first.close()
    for headers in [{"Last-Event-ID": last_id, "x-api-key": "two"}, {"Last-Event-ID": "0" * 32 + ".1"},
                    {"Last-Event-ID": last_id + "9999"}, {"Last-Event-ID": "x"}, {"Last-Event-ID": last_id + "x"}]:
        answer = read_until(post(patient.port, {"messages": ASK, "stream": True}, **headers))
        assert answer.startswith("HTTP/1.1 404 ") and "stream_not_found" in answer


def test_a_stream_that_nobody_resumes_ends(tmp_path):
    server = ScriptedServer.start(tmp_path, "--resume-window", "1")
    try:
        server.say("word " * 30_000, step_ms=5)
        first = post(server.port, {**ENDLESS, "stream": True}, **RESUMABLE)
        last_id = events_of(read_until(first, b"word"))[0][0]
        first.close()
        http = HttpClient(server.port)
        assert eventually(lambda: http.metric("vllm:num_requests_running") == 0)
        assert "404" in read_until(post(server.port, {}, **{"Last-Event-ID": last_id}))[:20]
    finally:
        server.stop()


def test_a_whole_answer_whose_client_leaves_ends_at_once_even_if_resumable(patient):
    http = HttpClient(patient.port)

    def running():
        text = http.get("/metrics", Authorization="Bearer one").text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running"))

    assert eventually(lambda: running() == 0)
    patient.say("word", step_ms=5)
    connection = post(patient.port, ENDLESS, **RESUMABLE)
    assert eventually(lambda: running() == 1)
    connection.close()
    assert eventually(lambda: running() == 0)


def test_a_long_prompt_holds_up_nobody(patient):
    http = HttpClient(patient.port)
    with post(patient.port, {"prompt": "some words, and more of them. " * 500_000}, "/tokenize") as tokenizing:
        num_answers = 0
        while not select.select([tokenizing], [], [], 0)[0]:
            assert http.get("/health").status == 200
            num_answers += 1
        assert read_until(tokenizing).startswith("HTTP/1.1 200 ")
    assert num_answers > 2  # and dozens where the machine is not busy; none if the one io thread were tokenizing


def test_progress_of_the_prompt_is_told_when_asked(tmp_path):
    server = ScriptedServer.start(tmp_path, "--max-num-batched-tokens", "64")
    try:
        http = HttpClient(server.port)
        server.say("one two")
        messages = [{"role": "user", "content": "a few words to read, " * 40}]
        chunks = http.chat_chunks(messages=messages, return_progress=True, stream_options={"include_usage": True})
        total = chunks[-1]["usage"]["prompt_tokens"]
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert told == [chunk["prompt_progress"] for chunk in chunks[:len(told)]]  # before everything else
        assert [progress["processed"] for progress in told] == list(range(64, total, 64))
        for progress in told:
            assert progress["total"] == total and progress["cache"] == 0 and progress["time_ms"] >= 0
        completion = http.post("/v1/completions", {"prompt": "x " * 100, "stream": True, "return_progress": True})
        assert '"prompt_progress":{"total":' in completion.text
        refused = http.chat(return_progress=True)
        assert refused.status == 400 and refused.error["param"] == "return_progress"
        assert not any("prompt_progress" in chunk for chunk in http.chat_chunks(messages=messages))
    finally:
        server.stop()


def test_a_request_is_told_where_its_prompt_parts_from_earlier_ones(scripted, scripted_http):
    scripted.say("An answer.")
    system = {"role": "system", "content": "You know the test of the cache explanation"}

    def ask(*messages, **fields):
        answer = scripted_http.chat(messages=[system, *messages], explain_cache=True, **fields)
        assert answer.headers["x-cache-explanation"].isascii()
        return answer.json["cache_explanation"]

    first = [{"role": "user", "content": "A question about two cats"}]
    assert ask(*first)["reason"] in ("no_earlier_prompt", "differs")
    assert ask(*first)["reason"] == "same_prompt"
    more = [*first, {"role": "assistant", "content": "An answer."}, {"role": "user", "content": "And now?"}]
    continued = ask(*more)
    assert continued["reason"] == "continued" and 0 < continued["common_tokens"] < continued["prompt_tokens"]
    changed = ask({"role": "user", "content": "A question about two dogs"}, *more[1:])
    assert changed["reason"] == "differs" and changed["message_index"] == 1 and changed["place"] == "message 1 (user)"
    assert changed["earlier_token"]["text"].strip()[0] == "c" and changed["token"]["text"].strip()[0] == "d"
    assert "message 1 (user)" in changed["explanation"]
    rewritten = ask(first[0], {"role": "assistant", "content": "Another answer."}, more[2])
    assert rewritten["message_index"] == 2 and rewritten["place"] == "message 2 (assistant)"
    tool = {"type": "function", "function": {"name": "f"}}
    assert ask(*first, tools=[tool])["place"] == "the tools"
    assert "prefix cache: the first" in scripted.log.read_text()
    assert "cache_explanation" not in scripted_http.chat().json
    chunks = scripted_http.chat_chunks(messages=[system, *first], explain_cache=True)
    assert chunks[0]["choices"] == [] and chunks[0]["cache_explanation"]["reason"] == "same_prompt"


def test_nobody_is_told_of_anothers_prompts(patient):
    patient.say("ok")
    http = HttpClient(patient.port)
    body = {"messages": [{"role": "user", "content": "a secret of caller one"}], "explain_cache": True}
    for key, reasons in [("one", ["no_earlier_prompt", "differs"]), ("one", ["same_prompt"]), ("two", ["no_earlier_prompt"])]:
        answer = http.post("/v1/chat/completions", body, **{"x-api-key": key})
        assert answer.json["cache_explanation"]["reason"] in reasons
