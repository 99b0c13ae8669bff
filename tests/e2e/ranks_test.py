"""A model spread over ranks answers as one rank does, to the last bit, in every layout."""

import concurrent.futures
import time

import pytest

from http_client import HttpClient
from server_process import ServerProcess

PROMPTS = ["Add 12 and 30.", "Tell me a story about a fox.", "What is the capital of France?", "List three animals.",
           "The secret word is apple. What is the secret word?", "Count from one to ten.", "Write a poem about rain.",
           "Name the days of the week.", "Who are you?", "Subtract 5 from 19.", "Say hello in three ways.",
           "Describe a house.", "What comes after Monday?", "Make a list of fruits.", "Explain snow. " * 40,
           "Give me a short joke.", "A story of two brothers.", "Why is the sky blue?", "Repeat: blue green red.",
           "How do I boil an egg?"]


def start(folder, *flags: str) -> ServerProcess:
    return ServerProcess.serve(folder / "log.txt", "--device", "cpu", "--max-model-len", "4096", *flags)


def answers(server: ServerProcess) -> list[tuple[str, list[float]]]:
    """Greedy, to 256 tokens and beyond the end of the answer, ten at a time."""
    http = HttpClient(server.port)

    def ask(prompt: str) -> tuple[str, list[float]]:
        answer = http.chat(messages=[{"role": "user", "content": prompt}], max_tokens=256, temperature=0,
                           ignore_eos=True, logprobs=True)
        assert answer.status == 200, answer.text
        choice = answer.json["choices"][0]
        return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    server = start(tmp_path_factory.mktemp("one"))
    yield answers(server)
    server.stop()


@pytest.mark.parametrize("flags", [
    "--tensor-parallel-size 2", "--tensor-parallel-size 4 --enable-expert-parallel",
    "--data-parallel-size 2 --enable-expert-parallel",
    "--tensor-parallel-size 2 --data-parallel-size 2 --pipeline-parallel-size 2"])
def test_every_layout_gives_the_same_answers(flags, expected, tmp_path):
    server = start(tmp_path, *flags.split())
    try:
        assert answers(server) == expected
    finally:
        assert server.stop() == 0


def test_a_request_can_name_its_data_rank(tmp_path):
    server = start(tmp_path, "--data-parallel-size", "2")
    http = HttpClient(server.port)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    try:
        for rank in ["0", "1"]:
            assert http.post("/v1/chat/completions", body, **{"X-data-parallel-rank": rank}).status == 200
        for rank in ["2", "-1", "x"]:
            answer = http.post("/v1/chat/completions", body, **{"X-data-parallel-rank": rank})
            assert answer.status == 400 and "rank" in answer.error["message"], answer.text
    finally:
        server.stop()


@pytest.mark.parametrize("flags,num_stages", [
    ("--tensor-parallel-size 2", 1), ("--pipeline-parallel-size 2", 2), ("--data-parallel-size 2", 1)])
def test_prefixes_outlive_a_restart(flags, num_stages, tmp_path):
    disk = ["--kv-disk-dir", str(tmp_path / "kv"), "--kv-host-size", "64M"]

    def ask(server: ServerProcess) -> tuple[str, dict]:
        answer = HttpClient(server.port).chat(messages=[{"role": "user", "content": "The fox runs over the hill. " * 80}],
                                              max_tokens=40, temperature=0)
        assert answer.status == 200, answer.text
        return answer.json["choices"][0]["message"]["content"], answer.json["usage"]

    def wait_until_on_disk(server: ServerProcess, num_tokens: int) -> None:
        http = HttpClient(server.port)
        for _ in range(600):
            blocks, snapshots = (list((tmp_path / "kv").rglob(f"*.{kind}")) for kind in ("block", "snapshot"))
            written = len(blocks) >= num_tokens // 256 * num_stages and len(snapshots) >= num_stages
            if written and http.metric("fathom:kv_disk_bytes") == sum(f.stat().st_size for f in blocks + snapshots):
                return
            time.sleep(0.1)
        raise AssertionError(f"not on disk: {blocks + snapshots}")

    server = start(tmp_path, *flags.split(), *disk)
    content, usage = ask(server)
    num_tokens = usage["prompt_tokens"]
    assert num_tokens > 256
    wait_until_on_disk(server, num_tokens)
    assert server.stop() == 0
    server = start(tmp_path, *flags.split(), *disk)
    wait_until_on_disk(server, num_tokens)
    again, usage = ask(server)
    assert server.stop() == 0
    assert again == content
    assert usage["prompt_tokens_details"]["cached_tokens"] == (num_tokens - 1) // 256 * 256


@pytest.mark.parametrize("flags,words", [
    (["--pipeline-parallel-size", "8"], "7 layers"), (["--tensor-parallel-size", "5"], "4 heads"),
    (["--data-parallel-size", "9", "--enable-expert-parallel"], "8 experts to 9 ranks"),
    (["--tensor-parallel-size", "0"], "from 1 to 1024"),
    (["--tensor-parallel-size", "3", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"], "evenly")])
def test_a_layout_that_cannot_be_is_one_line(flags, words, tmp_path):
    with pytest.raises(AssertionError, match="exit code 2") as refusal:
        start(tmp_path, *flags)
    lines = [line for line in str(refusal.value).splitlines() if line.startswith("fathom: ")]
    assert len(lines) == 1 and words in lines[0], refusal.value
