"""The built-in model on several GPUs has the bits of one, in every layout and whatever carries what they exchange, in one
process or in one for each. Skipped without them."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from http_client import HttpClient
from launchers_test import SECRET, torchrun
from ranks_test import PROMPTS
from server_process import BINARY, MODEL, ServerProcess, free_port


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")


# Of the prompts, for what changes how ranks work and not what they share out; a long one is among them.
FEW = PROMPTS[2::4]


def ask(port: int, prompts: list[str] = PROMPTS) -> list[tuple[str, list[float]]]:
    """Greedy, one at a time: on a GPU the last bits depend on how many run together."""
    http = HttpClient(port)
    found = []
    for prompt in prompts:
        answer = http.chat(messages=[{"role": "user", "content": prompt}], max_tokens=256, temperature=0,
                           ignore_eos=True, logprobs=True)
        assert answer.status == 200, answer.text
        choice = answer.json["choices"][0]
        found.append((choice["message"]["content"], [t["logprob"] for t in choice["logprobs"]["content"]]))
    return found


def answers(folder, *flags: str, prompts: list[str] = PROMPTS, **environment: str) -> list[tuple[str, list[float]]]:
    server = ServerProcess.serve(folder / "log.txt", "--device", "cuda", "--max-model-len", "4096", *flags,
                                 environment=environment)
    try:
        return ask(server.port, prompts)
    finally:
        assert server.stop() == 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Each prompt's answer on one GPU."""
    if count_gpus() < 2:
        pytest.skip("two GPUs are needed")
    return dict(zip(PROMPTS, answers(tmp_path_factory.mktemp("one"))))


@pytest.mark.parametrize("num_gpus,flags", [
    (2, "--tensor-parallel-size 2"), (2, "--pipeline-parallel-size 2"),
    (2, "--data-parallel-size 2 --enable-expert-parallel"), (2, "--data-parallel-size 2"),
    (2, "--tensor-parallel-size 2 --enable-expert-parallel"), (4, "--tensor-parallel-size 4"),
    (4, "--data-parallel-size 4 --enable-expert-parallel"), (4, "--tensor-parallel-size 4 --enable-expert-parallel"),
    (4, "--tensor-parallel-size 2 --data-parallel-size 2"),
    (4, "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel"),
    (4, "--pipeline-parallel-size 2 --tensor-parallel-size 2"),
    (4, "--pipeline-parallel-size 2 --tensor-parallel-size 2 --enable-expert-parallel"),
    (4, "--pipeline-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel")])
def test_every_layout_has_the_bits_of_one_gpu(num_gpus, flags, expected, tmp_path):
    if count_gpus() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs are needed")
    assert answers(tmp_path, *flags.split()) == list(expected.values())


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("flag", ["--enforce-eager", "--no-async-scheduling", "--disable-custom-all-reduce"])
def test_tensor_ranks_have_the_bits_of_one_gpu_however_they_run(num_gpus, flag, expected, tmp_path):
    if count_gpus() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs are needed")
    found = answers(tmp_path, "--tensor-parallel-size", str(num_gpus), flag, prompts=FEW)
    assert found == [expected[prompt] for prompt in FEW]


WHOLE_EXPERTS = [(2, "--tensor-parallel-size 2 --enable-expert-parallel"), (2, "--data-parallel-size 2"),
                 (4, "--tensor-parallel-size 2 --data-parallel-size 2")]


@pytest.mark.parametrize("num_gpus,flags", WHOLE_EXPERTS)
@pytest.mark.parametrize("flag", ["--enforce-eager", "--disable-custom-all-reduce"])
def test_ranks_with_whole_experts_have_the_bits_of_one_gpu_however_they_run(num_gpus, flags, flag, expected, tmp_path):
    if count_gpus() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs are needed")
    assert answers(tmp_path, *flags.split(), flag, prompts=FEW) == [expected[prompt] for prompt in FEW]


@pytest.mark.parametrize("num_gpus,flags", [(2, "--tensor-parallel-size 2"), *WHOLE_EXPERTS])
def test_gpus_that_only_the_host_connects_have_the_bits_of_one(num_gpus, flags, expected, tmp_path):
    if count_gpus() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs are needed")
    (tmp_path / "libnccl.so.2").touch()  # is found first, and is no library
    found = answers(tmp_path, *flags.split(), "--disable-custom-all-reduce", prompts=FEW, LD_LIBRARY_PATH=str(tmp_path))
    assert found == [expected[prompt] for prompt in FEW]
    assert "ranks exchange through host memory" in (tmp_path / "log.txt").read_text()


@contextlib.contextmanager
def a_process_for_each_gpu(folder, *flags: str, visible: tuple[str, str] | None = None) -> Iterator[list[ServerProcess]]:
    """`visible`: the only GPU that each process sees."""
    port, meeting = free_port(), free_port()
    command = [str(BINARY), "serve", str(MODEL), "--device", "cuda", "--max-model-len", "4096", "--port", str(port),
               *flags]
    sight = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible] if visible else [{}, {}]
    nodes = [ServerProcess(command, port, folder / f"node{rank}.txt",
                           {**SECRET, **torchrun(rank, meeting), **sight[rank]}) for rank in range(2)]
    try:
        nodes[0].wait_until_ready(60)
        yield nodes
    finally:
        for node in nodes:
            if node.process.poll() is None:
                os.killpg(node.process.pid, signal.SIGKILL)


TWO_GPUS = ["--tensor-parallel-size 2", "--tensor-parallel-size 2 --enable-expert-parallel", "--pipeline-parallel-size 2",
            "--data-parallel-size 2 --enable-expert-parallel"]


@pytest.mark.parametrize("visible", [None, ("0", "1")], ids=["all_visible", "own_visible"])
@pytest.mark.parametrize("flags", TWO_GPUS)
def test_a_process_for_each_gpu_has_the_bits_of_one_gpu(flags, visible, expected, tmp_path):
    with a_process_for_each_gpu(tmp_path, *flags.split(), visible=visible) as nodes:
        assert ask(nodes[0].port, FEW) == [expected[prompt] for prompt in FEW]
        os.kill(nodes[0].process.pid, signal.SIGTERM)
        assert [node.ended() for node in nodes] == [0, 0], nodes[1].log.read_text()


@pytest.mark.skipif(count_gpus() < 1, reason="a GPU is needed")
def test_two_tensor_ranks_on_one_gpu_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="ranks 0 and 1 are on the same GPU"):
        with a_process_for_each_gpu(tmp_path, "--tensor-parallel-size", "2", visible=("0", "0")):
            pass


@pytest.mark.skipif(count_gpus() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("flags", TWO_GPUS)
def test_a_process_that_dies_or_hangs_ends_the_group(flags, signal_number, tmp_path):
    with a_process_for_each_gpu(tmp_path, *flags.split()) as nodes:
        running = HttpClient(nodes[0].port).begin("/v1/chat/completions", {
            "messages": [{"role": "user", "content": PROMPTS[1]}], "stream": True, "ignore_eos": True, "max_tokens": 3000})
        assert running.recv(65536)
        os.killpg(nodes[1].process.pid, signal_number)
        assert nodes[0].ended() == 6, nodes[0].log.read_text()
        line = [line for line in nodes[0].log.read_text().splitlines() if line.startswith("fathom: ")][-1]
        assert "node 1" in line or "rank 1" in line


def refusal(exit_code: int, *flags: str, **environment: str) -> str:
    done = subprocess.run([str(BINARY), "serve", str(MODEL), "--device", "cuda", *flags], capture_output=True, text=True,
                          timeout=60, env={**os.environ, **environment})
    assert done.returncode == exit_code and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_layout_that_gpus_do_not_run_is_one_line(expected):
    del expected  # there are GPUs
    for flags in ("--tensor-parallel-size 16", "--tensor-parallel-size 4 --data-parallel-size 4"):
        assert "at most 8 ranks in a stage" in refusal(2, *flags.split())
    assert "2 GPUs are needed" in refusal(5, "--tensor-parallel-size", "2", CUDA_VISIBLE_DEVICES="0")
