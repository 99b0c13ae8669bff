"""Text as the model writes it: calls, and the tokens around turns."""

import json
from typing import Any

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


def call(name: str, **arguments: Any) -> str:
    """One call; texts are given as str, other values as anything else."""
    parameters = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>" for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{parameters}\n</｜DSML｜invoke>'


def calls(*invokes: str) -> str:
    """The block of calls that ends a turn."""
    return "\n\n<｜DSML｜tool_calls>\n" + "\n".join(invokes) + "\n</｜DSML｜tool_calls>"
