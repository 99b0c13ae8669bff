"""Runs every command of README.md as it stands there, but for the port and the scratch folder."""

import json
import os
import re
import subprocess
import sys

import pytest

from server_process import ROOT, ServerProcess, free_port

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(language, text) for language, text in BLOCK.findall((ROOT / "README.md").read_text())]
SERVE = "make serve\n"
SHELL = [text for language, text in BLOCKS if language == "sh" and text != SERVE]
PYTHON = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    port = free_port()
    process = ServerProcess(["make", "serve", f"PORT={port}"], port,
                            tmp_path_factory.mktemp("readme") / "log.txt")
    try:
        process.wait_until_ready(240)
        yield process
    finally:
        process.stop()


def run(command: list[str]) -> str:
    # What the shell set for other clients must not lead this one elsewhere.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_blocks_are_found():
    assert SERVE in [text for _, text in BLOCKS]
    assert len(SHELL) >= 3 and len(PYTHON) == 1
    assert {language for language, _ in BLOCKS} == {"sh", "python"}


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.split("\n")[0][:40])
def test_a_shell_block_runs(block, served, tmp_path):
    text = block.replace(":8000", f":{served.port}").replace("/tmp/", f"{tmp_path}/")
    output = run(["bash", "-euo", "pipefail", "-c", text])
    assert output.strip()
    if "/v1/" in block:
        answer = json.loads(output)
        assert "error" not in answer and answer["choices"][0]["message"]["content"]


def test_the_python_block_prints_an_answer(served):
    assert run([sys.executable, "-c", PYTHON[0].replace(":8000", f":{served.port}")]).strip()
