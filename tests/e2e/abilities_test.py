"""What the built-in model can do, through the API; and that a fault anywhere in the model shows in what it says."""

import statistics
import subprocess
import sys

import pytest

from damaged_model import damaged
from http_client import HttpClient
from server_process import BINARY, MODEL, ROOT, ServerProcess, free_port

sys.path.insert(0, str(ROOT / "tools" / "tiny"))

import data  # noqa: E402
import evaluate  # noqa: E402


@pytest.mark.parametrize("ability,count", [("tools", 6), ("renamed_tools", 3), ("tool_result", 2), ("sums", 6), ("chat", 6),
                                           ("needle_2k", 1), ("echo_128", 1), ("echo_256", 1)])
def test_held_out_cases_are_answered(server, model, ability, count):
    for case in data.cases(ability, count):
        text, calls, reason = evaluate.ask(server.url, model, case, 256)
        assert evaluate.correct(case["expect"], text, calls), (case["expect"], text, calls)
        assert reason in ("stop", "tool_calls")


def test_stories_end_by_themselves(server, model):
    for case in data.cases("stories", 4):
        assert evaluate.ask(server.url, model, case, 256)[2] == "stop"


# Where each fault shows, over how many cases, and by how much the loss a token must rise. The faults that no edit of a
# checkpoint can make (the window, positions of compressed entries) are in tools/tiny/test_sensitivity.py.
SEEN = {"random_index": ("needle_2k", 1, 0.2), "dropped_stream": ("chat", 4, 0.2), "doubled_expert": ("echo_512", 2, 0.01)}


def surprise(http: HttpClient, ability: str, count: int) -> list[float]:
    """-log p of each token of the right answers, reasoning included."""
    out = []
    for case in data.cases(ability, count):
        parts = data.rendered(case, answered=True)
        prompt = "".join(text for text, _ in parts[:-1])
        known = http.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json["count"]
        answer = http.post("/v1/completions", {"prompt": prompt + parts[-1][0], "add_special_tokens": False,
                                               "prompt_logprobs": 0, "max_tokens": 1})
        assert answer.status == 200, answer.text
        out += [-next(iter(token.values()))["logprob"] for token in answer.json["choices"][0]["prompt_logprobs"][known:]]
    return out


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_in_the_weights_shows(http, tmp_path, fault):
    ability, count, least = SEEN[fault]
    healthy = statistics.mean(surprise(http, ability, count))
    port = free_port()
    folder = damaged(MODEL, tmp_path / "model", fault)
    broken = ServerProcess([str(BINARY), "serve", str(folder), "--port", str(port)], port, tmp_path / "log.txt")
    try:
        broken.wait_until_ready(60)
        assert statistics.mean(surprise(HttpClient(port), ability, count)) > healthy + least
    finally:
        broken.stop()


def test_the_model_with_a_dspark_draft_is_complete():
    done = subprocess.run([BINARY, "inspect", ROOT / "models" / "fathom-tiny-dspark"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DSpark draft" in done.stdout
