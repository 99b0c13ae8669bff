import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from scripted_server import ScriptedServer  # noqa: E402

# Node comes with the Python environment; these clients need version 22 or newer.
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """The real server over a scripted model that thinks unless told not to, with room for an agent's prompt."""
    process = ScriptedServer.start(tmp_path_factory.mktemp("scripted"), "--max-model-len", "1000000",
                                   "--default-chat-template-kwargs", '{"thinking": true}')
    yield process
    process.stop()


def run(command, folder, **environment):
    """A command with nothing of this environment but what is given; its standard output."""
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
                          env={"PATH": PATH, "HOME": str(folder), **environment})
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def node(scripted):
    """Runs one of the scripts here against the server; what it printed."""
    assert shutil.which("node", path=PATH), "no node: run scripts/setup --clients"
    return lambda script: json.loads(run(["node", str(HERE / script), scripted.url], HERE))


@pytest.fixture
def command():
    """The path of an installed client's command."""
    return lambda name: str(HERE / "node_modules" / ".bin" / name)
