"""A real server as a child process: started on a free port, ready when /health says so, always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("FATHOM_BINARY", ROOT / "build" / "fathom"))
MODEL = Path(os.environ.get("FATHOM_MODEL", ROOT / "models" / "fathom-tiny"))

# What the user's shell says to other clients, of proxies, and of the launcher that it runs under itself.
ELSEWHERE = ("OPENAI_", "ANTHROPIC_", "FATHOM_CLUSTER_", "SLURM_", "OMPI_", "PMI", "LWS_", "MASTER_", "RANK", "WORLD_SIZE",
             "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "JOB_COMPLETION_INDEX", "TORCHELASTIC_")
for variable in [name for name in os.environ if name.startswith(ELSEWHERE)]:
    del os.environ[variable]
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

ports: list[socket.socket] = []  # those that were given out


def free_port() -> int:
    """A port that nobody else gets while the tests run: it is bound, and who asks for this one may share it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    ports.append(holder)
    return holder.getsockname()[1]


class ServerProcess:
    """`command` must serve on `port` of 127.0.0.1; what it prints goes to `log`. `environment` is added to ours."""

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str] | None = None):
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = log
        # A group of its own: `make serve` has children.
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL,
                                        stdout=log.open("w"), stderr=subprocess.STDOUT,
                                        env={**os.environ, **(environment or {})}, start_new_session=True)

    def wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"not ready; exit code {self.process.poll()}:\n{self.log.read_text()}")

    @classmethod
    def serve(cls, log: Path, *flags: str, environment: dict[str, str] | None = None) -> ServerProcess:
        """The built-in model with these flags, ready to answer."""
        port = free_port()
        process = cls([str(BINARY), "serve", str(MODEL), "--port", str(port), *flags], port, log, environment)
        try:
            process.wait_until_ready(60)
        except AssertionError:
            process.stop()
            raise
        return process

    def ended(self) -> int:
        """The exit code of a process that is about to end."""
        return self.process.wait(60)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that does not end it; the exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            return self.ended()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
