"""Starts the server on the CPU and prints what a user of the small model feels.

    python3 bench/cpu_server.py build/fathom models/fathom-tiny

Start to first token: from starting the process to the first streamed token of a request sent as soon as the
port answers. Memory: resident after the runs, and what is more than the checkpoint. Prefill: prompt tokens by
the time to the first token. Decode: one stream, time between its first and last token. Median of the runs.
Needs nothing but Python; prints, asserts nothing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import time
from pathlib import Path

PROMPT_TOKENS, DECODED_TOKENS, RUNS, DEADLINE_S = 2000, 256, 5, 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for_port(port: int, server: subprocess.Popen) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.005)
    raise SystemExit(f"no server on port {port} after {DEADLINE_S} s")


def stream(port: int, model: str, prompt: list[int], max_tokens: int) -> list[float]:
    """When each piece of text came, in seconds after sending the request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "min_tokens": max_tokens,
            "ignore_eos": True, "temperature": 0, "stream": True}
    start = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {response.read().decode()}")
    times = []
    for line in response:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
            times.append(time.monotonic() - start)
    connection.close()
    return times


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def checkpoint_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def measure(args) -> None:
    config = json.loads((args.model / "config.json").read_text())
    rng, port, name = random.Random(1), free_port(), "bench"
    prompt = [rng.randrange(300, config["vocab_size"]) for _ in range(PROMPT_TOKENS)]
    command = [args.binary, "serve", str(args.model), "--served-model-name", name, "--port", str(port),
               "--host", "127.0.0.1", "--device", "cpu"]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for_port(port, server)
            ready = time.monotonic() - start
            first = ready + stream(port, name, prompt[:16], 1)[0]
            # Another prompt each time, so that nothing is read from a prefix cache.
            prefill = [PROMPT_TOKENS / stream(port, name, [i + 300, *prompt[1:]], 1)[0] for i in range(RUNS)]
            decode = []
            for _ in range(RUNS):
                times = stream(port, name, prompt[:64], DECODED_TOKENS)
                decode.append((DECODED_TOKENS - 1) / (times[-1] - times[0]))
            resident = resident_bytes(server.pid)
        finally:
            server.terminate()
            server.wait(DEADLINE_S)
    weights = checkpoint_bytes(args.model)
    print(f"start to port          {ready:8.2f} s")
    print(f"start to first token   {first:8.2f} s")
    print(f"prefill                {statistics.median(prefill):8.0f} tokens/s ({PROMPT_TOKENS} tokens)")
    print(f"decode, one stream     {statistics.median(decode):8.0f} tokens/s ({DECODED_TOKENS} tokens)")
    print(f"resident memory        {resident / 1e6:8.0f} MB: checkpoint {weights / 1e6:.0f} MB "
          f"and {(resident - weights) / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model", type=Path)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
