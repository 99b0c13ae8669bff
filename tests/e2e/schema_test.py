"""schemathesis: requests made from the OpenAPI document, valid and not; the server never answers with a 5xx.

EXAMPLES of the environment is how many are tried for each operation (the default is for CI)."""

import os

import hypothesis
import pytest
import schemathesis

from scripted_server import ScriptedServer

schema = schemathesis.pytest.from_fixture("document")


@pytest.fixture(scope="session")
def document(tmp_path_factory):
    server = ScriptedServer.start(tmp_path_factory.mktemp("schema"), "--max-model-len", "128")
    server.say("ok")
    yield schemathesis.openapi.from_url(server.url + "/openapi.json")
    server.stop()


@schema.parametrize()
@hypothesis.settings(max_examples=int(os.environ.get("EXAMPLES", "10")), deadline=None, derandomize=True,
                     database=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_request_gets_a_5xx(case):
    case.call_and_validate(checks=[schemathesis.checks.not_a_server_error], timeout=30)
