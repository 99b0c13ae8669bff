"""Processes that learn where they stand from their launcher's variables, and two hosts with a cable that is pulled."""

import os
import shutil
import signal
import subprocess

import pytest

from http_client import HttpClient, eventually
from server_process import BINARY, MODEL, ServerProcess, free_port

SECRET = {"FATHOM_CLUSTER_SECRET": "only the nodes know"}
SERVE = [str(BINARY), "serve", str(MODEL), "--device", "cpu", "--max-model-len", "4096", "--tensor-parallel-size", "2"]
HELLO = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 40, "temperature": 0}


@pytest.fixture
def start(tmp_path):
    started = []

    def start_process(command: list[str], port: int, environment: dict[str, str]) -> ServerProcess:
        log = tmp_path / f"process{len(started)}.txt"
        started.append(ServerProcess(command, port, log, {**SECRET, **environment}))
        return started[-1]

    yield start_process
    for process in started:
        if process.process.poll() is None:
            os.killpg(process.process.pid, signal.SIGKILL)
            process.process.wait()


def torchrun(rank: int, meeting: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting)}


def slurm(rank: int, meeting: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NODEID": str(rank),
            "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "MASTER_PORT": str(meeting)}


def leader_worker_set(rank: int, meeting: int) -> dict[str, str]:
    return {"LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(rank),
            "MASTER_PORT": str(meeting)}


@pytest.mark.parametrize("launcher", [torchrun, slurm, leader_worker_set])
def test_a_launchers_variables_are_enough(http, start, launcher):
    port, meeting = free_port(), free_port()
    nodes = [start([*SERVE, "--port", str(port)], port, launcher(rank, meeting)) for rank in range(2)]
    nodes[0].wait_until_ready(60)
    assert HttpClient(port).chat(**HELLO).json["choices"] == http.chat(**HELLO).json["choices"]
    os.kill(nodes[0].process.pid, signal.SIGTERM)
    assert [node.ended() for node in nodes] == [0, 0], nodes[1].log.read_text()


@pytest.mark.parametrize("launcher", [torchrun, slurm, leader_worker_set])
def test_a_model_on_one_device_is_a_server_of_its_own(start, launcher):
    port = free_port()
    alone = start([str(BINARY), "serve", str(MODEL), "--device", "cpu", "--port", str(port)], port,
                  launcher(1, free_port()))
    alone.wait_until_ready(60)
    assert HttpClient(port).chat(**HELLO).status == 200


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_mpirun_starts_a_group(http, start):
    port = free_port()
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *SERVE, "--port", str(port),
              "--master-port", str(free_port())]
    group = start(mpirun, port, {})
    group.wait_until_ready(60)
    assert HttpClient(port).chat(**HELLO).json["choices"] == http.chat(**HELLO).json["choices"]
    group.stop()  # mpirun's own exit code; it kills what does not end at once


def test_a_signal_to_all_nodes_at_once_lets_node_0_drain(start):
    port, meeting = free_port(), free_port()
    nodes = [start([*SERVE, "--port", str(port)], port, torchrun(rank, meeting)) for rank in range(2)]
    nodes[0].wait_until_ready(60)
    running = HttpClient(port).begin("/v1/chat/completions",
                                     {**HELLO, "stream": True, "ignore_eos": True, "max_tokens": 200})
    answer = running.recv(65536)
    for node in reversed(nodes):
        os.kill(node.process.pid, signal.SIGTERM)
    while data := running.recv(65536):
        answer += data
    assert b'"finish_reason":"length"' in answer
    assert [node.ended() for node in nodes] == [0, 0], nodes[0].log.read_text()


def test_strangers_at_the_meeting_port_do_not_matter(start):
    port, meeting = free_port(), free_port()
    first = start([*SERVE, "--port", str(port)], port, torchrun(0, meeting))
    assert eventually(lambda: "waits for 1 other" in first.log.read_text())
    stranger = HttpClient(meeting).begin("/v1/chat/completions", HELLO)
    start([*SERVE, "--port", str(port)], port, torchrun(1, meeting))
    first.wait_until_ready(60)
    assert "no Fathom node" in first.log.read_text()
    stranger.close()


class Cable:
    """A network namespace with the address .2 on a cable to this one's .1, in a network of this process's own."""

    def __init__(self):
        self.name = f"fathom{os.getpid()}"
        self.network = f"10.{213 + (os.getpid() >> 8) % 32}.{os.getpid() % 256}"

    def ip(self, *arguments: str) -> bool:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0

    def plug(self) -> bool:
        return (self.ip("netns", "add", self.name)
                and self.ip("link", "add", self.name, "type", "veth", "peer", "name", "far", "netns", self.name)
                and self.ip("addr", "add", f"{self.network}.1/24", "dev", self.name)
                and self.ip("link", "set", self.name, "up")
                and self.ip("-n", self.name, "addr", "add", f"{self.network}.2/24", "dev", "far")
                and self.ip("-n", self.name, "link", "set", "far", "up"))

    def pull(self) -> None:
        assert self.ip("-n", self.name, "link", "set", "far", "down")

    def remove(self) -> None:
        self.ip("link", "del", self.name)
        self.ip("netns", "del", self.name)


@pytest.fixture
def cable():
    cable = Cable()
    is_plugged = shutil.which("ip") is not None and cable.plug()
    if is_plugged:
        yield cable
    cable.remove()
    if not is_plugged:
        pytest.skip("no network namespaces here")


def test_two_hosts_notice_a_pulled_cable(http, start, cable):
    port, meeting = free_port(), free_port()
    flags = ["--nnodes", "2", "--master-addr", f"{cable.network}.1", "--master-port", str(meeting), "--port", str(port)]
    near = start([*SERVE, *flags, "--node-rank", "0"], port, {})
    far = start(["ip", "netns", "exec", cable.name, *SERVE, *flags, "--node-rank", "1"], port, {})
    near.wait_until_ready(60)
    together = HttpClient(port)
    assert together.chat(**HELLO).json["choices"] == http.chat(**HELLO).json["choices"]
    running = together.begin("/v1/chat/completions", {**HELLO, "stream": True, "ignore_eos": True, "max_tokens": 3000})
    assert running.recv(65536)
    cable.pull()
    for rank, node in enumerate([near, far]):
        assert node.ended() == 6, node.log.read_text()
        line = [line for line in node.log.read_text().splitlines() if line.startswith("fathom: ")][-1]
        assert f"node {1 - rank}" in line or f"rank {1 - rank}" in line
