"""The built-in model on several GPUs has the bits of one, whatever carries what they exchange. Skipped without them."""

import shutil
import subprocess

import pytest

from http_client import HttpClient
from ranks_test import PROMPTS
from server_process import ServerProcess


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")


def answers(folder, *flags: str) -> list[tuple[str, list[float]]]:
    """Greedy, one at a time: on a GPU the last bits depend on how many run together."""
    server = ServerProcess.serve(folder / "log.txt", "--device", "cuda", "--max-model-len", "4096", *flags)
    http = HttpClient(server.port)
    found = []
    try:
        for prompt in PROMPTS:
            answer = http.chat(messages=[{"role": "user", "content": prompt}], max_tokens=256, temperature=0,
                               ignore_eos=True, logprobs=True)
            assert answer.status == 200, answer.text
            choice = answer.json["choices"][0]
            found.append((choice["message"]["content"], [t["logprob"] for t in choice["logprobs"]["content"]]))
    finally:
        assert server.stop() == 0
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    if count_gpus() < 2:
        pytest.skip("two GPUs are needed")
    return answers(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("flags", [[], ["--enforce-eager"], ["--no-async-scheduling"], ["--disable-custom-all-reduce"]])
def test_several_gpus_have_the_bits_of_one(num_gpus, flags, expected, tmp_path):
    if count_gpus() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs are needed")
    assert answers(tmp_path, "--tensor-parallel-size", str(num_gpus), *flags) == expected
