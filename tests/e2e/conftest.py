import pytest

from server_process import BINARY, MODEL, ServerProcess, free_port


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The built-in model, served with default flags to all tests that do not change the server's state."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    process = ServerProcess([str(BINARY), "serve", str(MODEL), "--port", str(port)], port, log)
    try:
        process.wait_until_ready(60)
        yield process
    finally:
        process.stop()
