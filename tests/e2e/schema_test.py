"""schemathesis: requests made from the OpenAPI document, valid and not; the server never answers with a 5xx.

EXAMPLES of the environment is how many are tried for each operation (the default is for CI)."""

import os

import hypothesis
import pytest
import schemathesis

from scripted_server import ScriptedServer
from server_process import ROOT

schema = schemathesis.openapi.from_path(ROOT / "src" / "api" / "openapi.json")


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """A server whose answers are short."""
    server = ScriptedServer.start(tmp_path_factory.mktemp("schema"), "--max-model-len", "128")
    server.say("ok")
    yield server
    server.stop()


@schema.parametrize()
@hypothesis.settings(max_examples=int(os.environ.get("EXAMPLES", "2")), deadline=None, derandomize=True,
                     database=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_request_gets_a_5xx(case, brief):
    case.call_and_validate(base_url=brief.url, checks=[schemathesis.checks.not_a_server_error], timeout=120)
