"""The real server with a model that says what a test tells it to (scripted_server.cc)."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_process import BINARY, MODEL, ServerProcess, free_port

SCRIPTED_BINARY = Path(os.environ.get("FATHOM_SCRIPTED", BINARY.parent / "scripted_server"))


class ScriptedServer(ServerProcess):
    @classmethod
    def start(cls, folder: Path, *flags: str) -> ScriptedServer:
        """Ready to answer; `folder` is empty and gets the script and the log."""
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        script = folder / "script.json"
        script.write_text('[{"say": "Hello there."}]')
        process = cls([str(SCRIPTED_BINARY), "--script", str(script), str(MODEL), "--served-model-name", "scripted",
                       "--port", str(port), *flags], port, folder / "log.txt")
        process.script = script
        try:
            process.wait_until_ready(60)
        except AssertionError:
            process.stop()
            raise
        return process

    def rules(self, rules: list[dict[str, Any]]) -> None:
        """Of prompts that come from now on; the last rule that fits wins."""
        new = self.script.with_suffix(".new")
        new.write_text(json.dumps(rules))
        new.replace(self.script)

    def say(self, text: str, **fields: Any) -> None:
        """Every prompt is answered with `text`; special tokens' text becomes their ids. See scripted_server.cc."""
        self.rules([{"say": text, **fields}])

    def say_when_told(self, text: str, **fields: Any) -> Callable[[], None]:
        """The same, but the first token is not there before the function that this returns was called."""
        told = self.script.with_name(f"told-{uuid.uuid4()}")
        self.say(text, until=str(told), **fields)
        return told.touch
