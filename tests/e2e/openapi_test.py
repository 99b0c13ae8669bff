"""The OpenAPI document says what the server does: its routes are there, and every field that is read is in it."""

import re

from server_process import ROOT

READ = re.compile(r'(?:fields|reader|request|kwargs)(?:->|\.)(?:Bool|Integer|Number|String|Object|Array|Find|TokenIds)\(\s*"(\w+)"')
READ_TOO = re.compile(r'Read(?:Strings|TokenIds)\(\w+, "(\w+)"')
# Refused wherever they come, or of another dialect than the documents' schemas that are compared.
NOT_DOCUMENTED = {"chat_template", "type", "use_beam_search"}


def test_every_documented_route_answers(scripted_http):
    document = scripted_http.get("/openapi.json").json
    assert document["openapi"].startswith("3.1") and document["info"]["version"] == scripted_http.get("/version").json["version"]
    for path, methods in document["paths"].items():
        allowed = scripted_http.request("OPTIONS", re.sub(r"\{\w+\}", "x", path)).headers["allow"]
        for method in methods:
            assert method.upper() in allowed, (path, method)


def test_every_field_that_is_read_is_documented(scripted_http):
    schemas = scripted_http.get("/openapi.json").json["components"]["schemas"]
    documented = set()
    for name in ["ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"]:
        for field, schema in schemas[name]["properties"].items():
            documented |= {field, *schema.get("properties", {})}
    folder = ROOT / "src" / "api"
    read = set()
    for source in [folder / "generation_params.cc", folder / "thinking_mode.cc", folder / "output_rules.cc",
                   *(folder / "openai").glob("*.cc")]:
        text = source.read_text()
        read |= set(READ.findall(text)) | set(READ_TOO.findall(text))
    assert len(read) > 40
    missing = read - documented - NOT_DOCUMENTED
    assert not missing, f"read and not in src/api/openapi.json: {sorted(missing)}"


def test_every_metric_is_in_the_manual(scripted, scripted_http):
    scripted.say("ok")
    scripted_http.chat()
    manual = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    names = re.findall(r"^# TYPE (\S+)", scripted_http.get("/metrics").text, re.MULTILINE)
    assert len(names) > 10
    missing = [name for name in names if f"`{name}`" not in manual and f"`{name}{{" not in manual]
    assert not missing, f"not in docs/: {missing}"
