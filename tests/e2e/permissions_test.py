"""What a server does only when its operator allows it: routed experts, priorities, cache resets, keys that share nothing."""

import array
import ast
import base64
import json
import select

import openai
import pytest

from http_client import HttpClient, eventually
from scripted_server import ScriptedServer
from server_process import MODEL, ServerProcess

CONFIG = json.loads((MODEL / "config.json").read_text())
LAYERS, EXPERTS, CHOSEN = (CONFIG[name] for name in ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok"))
MESSAGES = [{"role": "user", "content": "Repeat: the quick brown fox jumps over the lazy dog."}]


@pytest.fixture(scope="module")
def allowing(tmp_path_factory):
    process = ServerProcess.serve(tmp_path_factory.mktemp("allowing") / "log.txt", "--enable-return-routed-experts",
                                  "--enable-cache-reset", "--max-num-seqs", "1")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def isolating(tmp_path_factory):
    process = ServerProcess.serve(tmp_path_factory.mktemp("isolating") / "log.txt", "--isolate-tenants",
                                  "--api-key", "alice", "bob")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def rl(allowing):
    """The official client, as a rollout worker uses it."""
    client = openai.OpenAI(base_url=allowing.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def ask(**fields):
        fields = {"return_routed_experts": True, "return_token_ids": True, **fields}
        known = {name: fields.pop(name) for name in ("messages", "max_tokens", "n", "stop") if name in fields}
        return client.chat.completions.create(model=str(MODEL), **{"messages": MESSAGES, "max_tokens": 12, **known},
                                              temperature=0, extra_body=fields)
    return ask


def rows(text):
    """What np.load reads, without NumPy: one list of [layers][experts] a token."""
    data = base64.b64decode(text)
    assert data[:8] == b"\x93NUMPY\x01\x00"
    size = int.from_bytes(data[8:10], "little")
    assert (10 + size) % 64 == 0 and data[9 + size:10 + size] == b"\n"
    head = ast.literal_eval(data[10:10 + size].decode())
    assert head["descr"] == "|u1" and not head["fortran_order"]
    tokens, layers, chosen = head["shape"]
    ids = array.array("B", data[10 + size:])
    assert len(ids) == tokens * layers * chosen and (layers, chosen) == (LAYERS, CHOSEN)
    return [[list(ids[(t * layers + layer) * chosen:][:chosen]) for layer in range(layers)] for t in range(tokens)]


def test_every_token_that_was_run_has_its_experts(rl):
    answer = rl()
    experts = rows(answer.choices[0].routed_experts)
    assert len(experts) == answer.usage.total_tokens - 1
    for token in experts:
        for ids in token:
            assert ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] < EXPERTS
    assert len({str(token) for token in experts}) > len(experts) / 2


def test_experts_do_not_depend_on_how_tokens_came(rl, allowing):
    answer = rl(max_tokens=20)
    experts = rows(answer.choices[0].routed_experts)
    prompt, output = answer.prompt_token_ids, answer.choices[0].token_ids
    # As a prompt, in one piece, and asked for from the middle on.
    client = HttpClient(allowing.port)
    body = {"prompt": prompt + output, "max_tokens": 1, "return_routed_experts": True}
    again = client.post("/v1/completions", body).json["choices"][0]
    assert rows(again["routed_experts"])[: len(experts)] == experts
    part = client.post("/v1/completions", {**body, "routed_experts_prompt_start": 9}).json["choices"][0]
    assert rows(part["routed_experts"]) == rows(again["routed_experts"])[9:]
    part = client.post("/v1/completions", {**body, "routed_experts_start_len": len(prompt + output)}).json["choices"][0]
    assert rows(part["routed_experts"]) == []


def test_choices_and_stop_strings_have_theirs(rl):
    whole = rl(max_tokens=30)
    answer = rl(n=2, max_tokens=30, stop=[whole.choices[0].message.content[4:9]])
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and len(choice.token_ids) < 30
        experts = rows(choice.routed_experts)
        assert len(experts) == answer.usage.prompt_tokens + len(choice.token_ids) - 1
        assert experts == rows(whole.choices[0].routed_experts)[: len(experts)]


def test_a_turn_that_goes_on_takes_the_rest_from_the_cache(rl):
    first = rl(max_tokens=8)
    text = first.choices[0].message.content
    messages = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    known = first.usage.total_tokens - 1
    second = rl(messages=messages, routed_experts_prompt_start=known)
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 8
    whole = rows(rl(messages=messages).choices[0].routed_experts)
    assert rows(second.choices[0].routed_experts) == whole[known:]


def test_bad_requests_for_experts_are_refused(rl, http):
    for fields, words in [({"stream": True}, "not allowed when stream"),
                          ({"routed_experts_prompt_start": 10_000}, "the prompt has"),
                          ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start")]:
        with pytest.raises(openai.BadRequestError, match=words):
            rl(**fields)
    refused = http.chat(return_routed_experts=True)
    assert refused.status == 400 and "--enable-return-routed-experts" in refused.error["message"]
    assert "routed_experts" not in http.chat(max_tokens=1).json["choices"][0]


def test_a_reset_forgets_what_was_cached(allowing, http):
    client = HttpClient(allowing.port)

    def cached():
        prompt = "what is kept of this prompt " * 200
        answer = client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 and cached() > 0
    reset = client.post("/reset_prefix_cache", b"")
    assert (reset.status, reset.text) == (200, "")
    assert cached() == 0 and cached() > 0
    assert http.post("/reset_prefix_cache", b"").status == 403


def test_a_lower_priority_value_runs_first(tmp_path):
    server = ScriptedServer.start(tmp_path, "--scheduling-policy", "priority", "--max-num-seqs", "1")
    server.say("word", step_ms=5)
    client = HttpClient(server.port)
    try:
        # It would run for minutes.
        first = client.begin("/v1/completions", {"prompt": "first", "max_tokens": 100_000, "ignore_eos": True, "stream": True})
        assert eventually(lambda: client.metric("vllm:num_requests_running") == 1)
        later = client.begin("/v1/completions", {"prompt": "later", "priority": 5})
        assert eventually(lambda: client.metric("vllm:num_requests_waiting") == 1)
        assert client.post("/v1/completions", {"prompt": "sooner", "priority": -5}).status == 200
        assert not select.select([later], [], [], 0)[0]
        first.close()
        assert later.recv(65536).startswith(b"HTTP/1.1 200 ")
        later.close()
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_isolated_keys_share_no_prefix(isolating, path):
    text = f"words that two tenants of {path} have in common " * 60
    prompt = {"input": text} if "responses" in path else {"messages": [{"role": "user", "content": text}]}
    if path == "/v1/completions":
        prompt = {"prompt": text}
    body = {**prompt, "max_tokens": 1, "max_output_tokens": 1, "model": str(MODEL)}

    def cached(key):
        usage = HttpClient(isolating.port).post(path, body, **{"x-api-key": key}).json["usage"]
        if "messages" in path:
            return usage["cache_read_input_tokens"]
        return usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"]

    assert cached("alice") == 0 and cached("alice") > 0
    assert cached("bob") == 0 and cached("bob") > 0
