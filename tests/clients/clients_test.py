"""The clients that people have, unmodified: SDKs for Node, the Vercel AI SDK, Claude Code, Codex.

Each has a conversation with a tool, and gets the last answer only if the server put the turn with the call back into
the prompt exactly as it was sampled.
"""

import json
import socket

import pytest

from conftest import run
from dsml import ASSISTANT, EOS, USER, call, calls

FINAL = "The note says: hello from file"


def script(scripted, invoke):
    first = "I must look.</think>Let me see." + calls(invoke)
    scripted.rules([{"say": first}, {"when": "<tool_result>", "say": "Hm.</think>The turn was not replayed."},
                    {"when": f"{ASSISTANT}<think>{first}{EOS}{USER}<tool_result>", "say": f"Now I know.</think>{FINAL}"}])


@pytest.fixture
def weather(scripted):
    script(scripted, call("get_weather", city="Paris"))


def test_there_is_no_network_but_loopback():
    names = [name for _, name in socket.if_nameindex()]
    if names != ["lo"]:
        pytest.skip("not in a network namespace of its own: see tests/clients/run")


def test_anthropic_sdk_for_node(node, weather):
    seen = node("anthropic_sdk.mjs")
    for form in ["whole", "streamed"]:
        assert seen[form] == {"turns": [["thinking", "text", "tool_use"], ["thinking", "text"]],
                              "inputs": [{"city": "Paris"}], "text": FINAL, "stop_reason": "end_turn"}
    assert seen["models"] == ["scripted"] and seen["input_tokens"] > 0
    assert seen["error"] == {"name": "NotFoundError", "status": 404, "type": "not_found_error", "has_request_id": True}


def test_openai_sdk_for_node(node, weather):
    seen = node("openai_sdk.mjs")
    for form in ["responses", "responses_with_state", "responses_streamed"]:
        assert seen[form] == {"turns": [["reasoning", "message", "function_call"], ["reasoning", "message"]],
                              "inputs": [{"city": "Paris"}], "text": FINAL, "status": "completed"}, form
    for form in ["chat", "chat_streamed"]:
        assert seen[form] == {"text": FINAL, "inputs": [{"city": "Paris"}]}


@pytest.mark.parametrize("dialect", ["responses", "anthropic", "chat"])
def test_vercel_ai_sdk(node, weather, dialect):
    seen = node("ai_sdk.mjs")[dialect]
    assert seen["text"] == seen["streamed_text"] == FINAL
    assert seen["steps"] == 2 and seen["finish"] == "stop" and seen["tokens"] > 0
    assert seen["inputs"] == [{"city": "Paris"}] * 2  # whole and streamed
    assert seen["reasoning"] == ["I must look.", "Now I know."]
    for part in ["reasoning-delta", "text-delta", "tool-input-delta", "tool-call", "tool-result", "finish"]:
        assert part in seen["parts"], part
    assert "error" not in seen["parts"]


@pytest.fixture
def folder(tmp_path):
    """A home and a project with a note; nothing else of this machine's."""
    (tmp_path / "note.txt").write_text("hello from file\n")
    return tmp_path


def test_claude_code(scripted, folder, command):
    script(scripted, call("Bash", command="cat note.txt", description="Read the note"))
    printed = run([command("claude"), "-p", "What does the note say?", "--model", "scripted[1m]", "--allowedTools", "Bash",
                   "--output-format", "stream-json", "--verbose"], folder,
                  ANTHROPIC_BASE_URL=scripted.url, ANTHROPIC_AUTH_TOKEN="none", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
                  DISABLE_AUTOUPDATER="1")
    events = [json.loads(line) for line in printed.splitlines()]
    result = events[-1]
    assert result["type"] == "result" and not result["is_error"] and result["result"] == FINAL
    assert result["num_turns"] == 2 and result["permission_denials"] == []
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "thinking", "text"]
    assert blocks[0]["thinking"] == "I must look." and blocks[2]["input"]["command"] == "cat note.txt"
    assert result["usage"]["input_tokens"] > 1000 and result["usage"]["output_tokens"] > 10


def test_codex(scripted, folder, command):
    script(scripted, call("exec_command", cmd="cat note.txt"))
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "fathom"\n[analytics]\nenabled = false\n[model_providers.fathom]\nname = "fathom"\n'
        f'base_url = "{scripted.url}/v1"\nwire_api = "responses"\n')
    printed = run([command("codex"), "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
                   "What does the note say?"], folder, CODEX_HOME=str(home))
    items = [event["item"] for line in printed.splitlines() if (event := json.loads(line))["type"] == "item.completed"]
    shown = [(item["type"], item.get("text", item.get("aggregated_output"))) for item in items if item["type"] != "error"]
    assert shown == [("reasoning", "I must look."), ("agent_message", "Let me see."), ("command_execution", "hello from file\n"),
                     ("reasoning", "Now I know."), ("agent_message", FINAL)]
