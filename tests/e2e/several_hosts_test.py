"""Several processes, as one on each host, serve one model: they meet, agree, answer as one, and end together."""

import os
import shutil
import signal
import time

import pytest

from http_client import HttpClient
from server_process import BINARY, MODEL, ServerProcess, free_port

SECRET = {"FATHOM_CLUSTER_SECRET": "only the nodes know"}
HELLO = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 40, "temperature": 0}


class Nodes:
    def __init__(self, folder, count: int, *flags: str):
        self.port, self.meeting = free_port(), free_port()
        self.nodes = [self.start(folder, rank, count, flags) for rank in range(count)]

    def start(self, folder, rank: int, count: int, flags: tuple[str, ...], model=MODEL,
              **environment: str) -> ServerProcess:
        return ServerProcess(
            [str(BINARY), "serve", str(model), "--device", "cpu", "--max-model-len", "4096", "--port", str(self.port),
             "--nnodes", str(count), "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port",
             str(self.meeting), *flags], self.port, folder / f"node{rank}.txt", {**SECRET, **environment})

    def wait(self) -> HttpClient:
        self.nodes[0].wait_until_ready(60)
        return HttpClient(self.port)

    def log(self, rank: int) -> str:
        return self.nodes[rank].log.read_text()

    def stop(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                os.killpg(node.process.pid, signal.SIGKILL)
                node.process.wait()


@pytest.fixture
def start(tmp_path):
    groups = []

    def start_nodes(count: int, *flags: str) -> Nodes:
        groups.append(Nodes(tmp_path, count, *flags))
        return groups[-1]

    yield start_nodes
    for group in groups:
        group.stop()


@pytest.mark.parametrize("count,flags", [
    (2, ["--tensor-parallel-size", "2"]), (2, ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"]),
    (3, ["--data-parallel-size", "3", "--enable-expert-parallel"])])
def test_nodes_answer_as_one_process_and_end_together(http, start, count, flags):
    nodes = start(count, *flags)
    together = nodes.wait()
    # The default server's context differs; the answer does not.
    assert together.chat(**HELLO).json["choices"] == http.chat(**HELLO).json["choices"]
    os.kill(nodes.nodes[0].process.pid, signal.SIGTERM)
    assert [node.ended() for node in nodes.nodes] == [0] * count, nodes.log(1)


def ends_with_peer_error(node: ServerProcess) -> str:
    """The line that says why."""
    assert node.ended() == 6, node.log.read_text()
    return [line for line in node.log.read_text().splitlines() if line.startswith("fathom: ")][-1]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_dies_or_hangs_ends_the_group(start, signal_number, victim):
    nodes = start(2, "--tensor-parallel-size", "2")
    together = nodes.wait()
    running = together.begin("/v1/chat/completions", {**HELLO, "stream": True, "ignore_eos": True, "max_tokens": 3000})
    assert running.recv(65536)
    os.killpg(nodes.nodes[victim].process.pid, signal_number)
    line = ends_with_peer_error(nodes.nodes[1 - victim])
    assert f"node {victim}" in line or f"rank {victim}" in line
    if victim == 1:  # the client is told
        rest = b""
        while data := running.recv(65536):
            rest += data
        assert b'"error"' in rest


def test_idle_nodes_notice_a_death_too(start):
    nodes = start(2, "--tensor-parallel-size", "2")
    nodes.wait()
    os.killpg(nodes.nodes[1].process.pid, signal.SIGKILL)
    assert "node 1" in ends_with_peer_error(nodes.nodes[0])


def test_nodes_that_differ_are_told_how(start):
    nodes = start(1, "--nnodes", "2", "--tensor-parallel-size", "2")
    other = nodes.start(nodes.nodes[0].log.parent, 1, 2, ("--tensor-parallel-size", "2", "--max-num-seqs", "7"))
    nodes.nodes.append(other)
    assert nodes.nodes[0].ended() == 2 and other.ended() == 2
    for rank in (0, 1):
        assert "--max-num-seqs" in nodes.log(rank) and "7" in nodes.log(rank)


def test_a_node_with_another_secret_is_refused(start):
    nodes = start(1, "--nnodes", "2", "--tensor-parallel-size", "2")
    other = nodes.start(nodes.nodes[0].log.parent, 1, 2, ("--tensor-parallel-size", "2"),
                        FATHOM_CLUSTER_SECRET="a guess")
    nodes.nodes.append(other)
    assert other.ended() == 6
    assert "secret" in nodes.log(1)
    time.sleep(0.5)
    assert nodes.nodes[0].process.poll() is None  # still waits for the right one


def test_a_node_that_cannot_load_tells_the_others_why(start, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    os.truncate(broken / "model.safetensors", 1 << 20)
    nodes = start(1, "--nnodes", "2", "--tensor-parallel-size", "2")
    nodes.nodes.append(nodes.start(tmp_path, 1, 2, ("--tensor-parallel-size", "2"), model=broken))
    assert nodes.nodes[1].ended() == 4
    assert nodes.nodes[0].ended() == 6
    last = nodes.log(0).splitlines()[-1]
    assert "node 1" in last and "model.safetensors" in last


def test_several_nodes_need_a_secret(tmp_path):
    node = ServerProcess([str(BINARY), "serve", str(MODEL), "--nnodes", "2", "--node-rank", "0", "--master-addr",
                          "127.0.0.1", "--tensor-parallel-size", "2"], free_port(), tmp_path / "log.txt")
    assert node.ended() == 2 and "FATHOM_CLUSTER_SECRET" in node.log.read_text()
