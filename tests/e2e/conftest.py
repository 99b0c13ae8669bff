from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from http_client import Answer, HttpClient
from scripted_server import ScriptedServer
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The built-in model, served with default flags to all tests that do not change the server's state."""
    process = ServerProcess.serve(tmp_path_factory.mktemp("server") / "log.txt")
    yield process
    process.stop()


@pytest.fixture(scope="session")
def http(server) -> HttpClient:
    return HttpClient(server.port)


@pytest.fixture(scope="session")
def client(server) -> OpenAI:
    """The official client, unmodified; its retries would hide errors."""
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def model(client) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """The real server with a model that says what a test tells it to: `scripted.say("…")` first."""
    process = ScriptedServer.start(tmp_path_factory.mktemp("scripted"))
    yield process
    process.stop()


@pytest.fixture(scope="session")
def scripted_http(scripted) -> HttpClient:
    return HttpClient(scripted.port)


@pytest.fixture(scope="session")
def scripted_openai(scripted) -> OpenAI:
    return OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def scripted_anthropic(scripted) -> Anthropic:
    return Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def official_chat(scripted_openai):
    """A chat that the official client sends; what came over the wire, an error's status and body included."""
    def ask(messages: Any, **fields: Any) -> Answer:
        try:
            response = scripted_openai.chat.completions.with_raw_response.create(
                model="scripted", messages=messages, extra_body=fields).http_response
        except openai.APIStatusError as error:
            response = error.response
        return Answer(response.status_code, {k.lower(): v for k, v in response.headers.items()}, response.text)
    return ask
