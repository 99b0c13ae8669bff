"""JSON over HTTP with nothing in between, and the bytes themselves where a test needs them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class HttpClient:
    def __init__(self, port: int):
        self.port = port

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """`body`: bytes and str go as they are, anything else as JSON."""
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()},
                          response.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, {"Content-Type": "application/json", **headers})

    def chat(self, **fields: Any) -> Answer:
        return self.post("/v1/chat/completions",
                         {"messages": [{"role": "user", "content": "Tell me a story."}], **fields})

    def chat_chunks(self, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed chat; the last event must be [DONE]."""
        answer = self.chat(stream=True, **fields)
        assert answer.status == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        series = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        values = [float(value) for found, value in series
                  if all(f'{label}="{wanted}"' in found for label, wanted in labels.items())]
        assert values, f"no metric {name} {labels}"
        return sum(values)

    def begin(self, path: str, body: Any) -> socket.socket:
        """Sends a request and returns its socket, with nothing of the answer read."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
