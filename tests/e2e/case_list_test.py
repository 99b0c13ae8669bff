"""Every conformance case has a test over a real socket, named after it: test_c017_…"""

import re
from pathlib import Path

CASES = {
    1: "official vectors", 2: "every rule of the encoder", 3: "token ids of the reference library",
    4: "effort prefixes by checkpoint", 5: "effort without thinking", 6: "tools after the system text",
    7: "tools given twice", 8: "order of schema keys", 9: "1.0, 1e10 and 1 in arguments", 10: "raw text in arguments",
    11: "30 digits in arguments", 12: "tool results in call order", 13: "users in a row",
    14: "reasoning kept with tools only", 15: "prefix", 16: "arguments that are no object", 17: "special text of users",
    18: "digits, spaces, emoji", 19: "V4.1 refused", 20: "reasoning and content", 21: "no thinking, no reasoning",
    22: "cut inside thinking", 23: "tag in pieces", 24: "a lone <", 25: "newlines at the end", 26: "two invokes",
    27: "markup by the character", 28: "text parameters", 29: "fragment of a closing tag", 30: "invalid JSON parameter",
    31: "JSON parameter types", 32: "no parameters", 33: "block inside thinking", 34: "no end of the block",
    35: "end inside a parameter", 36: "markup without tools", 37: "tool_choice none", 38: "tool_choice required",
    39: "named tool", 40: "missing tool", 41: "no parallel calls", 42: "wrapped arguments", 43: "character of three tokens",
    44: "stop string in two tokens", 45: "stop string inside itself", 46: "kept stop string",
    47: "stop string in reasoning", 48: "two stop strings", 49: "invalid UTF-8 at the end", 50: "another turn's token",
    51: "models", 52: "unknown model", 53: "bad JSON", 54: "empty body", 55: "body over the limit",
    56: "chunked and Expect", 57: "no messages", 58: "null content", 59: "image", 60: "other parts", 61: "max_tokens",
    62: "max_completion_tokens", 63: "temperature", 64: "top_p and top_k", 65: "n", 66: "prompt over the context",
    67: "sum over the context", 68: "stream_options without stream", 69: "include_usage", 70: "continuous usage",
    71: "cached tokens", 72: "reasoning tokens", 73: "logprobs", 74: "logprob limits", 75: "ignore_eos", 76: "min_tokens",
    77: "seed", 78: "logit_bias", 79: "json_schema", 80: "json_object in thinking", 81: "two forms", 82: "token ids",
    83: "cache salts", 84: "priority", 85: "transfer parameters", 86: "continue and new header",
    87: "thinking disabled", 88: "thinking bogus", 89: "efforts", 90: "chat_template", 91: "roles",
    92: "unknown fields", 93: "leaving mid-stream", 94: "leaving while queued", 95: "slow reader",
    96: "10,000 idle connections", 97: "SIGTERM", 98: "full queue", 99: "keys", 100: "405 and 404", 101: "completions",
    102: "ids out of range", 103: "lone surrogate", 104: "1 MiB of one character", 105: "deep JSON",
    106: "assistants in a row", 107: "responses", 108: "event order", 109: "whole equals streamed",
    110: "system as string or block", 111: "billing header", 112: "?beta=true", 113: "HEAD /", 114: "[1m]",
    115: "unknown beta", 116: "max_tokens required", 117: "tool round trip", 118: "parallel tool results",
    119: "image in a tool result", 120: "user image", 121: "thinking forms", 122: "redacted thinking",
    123: "web search only", 124: "stop sequences", 125: "max_tokens reached", 126: "count_tokens", 127: "prompt too long",
    128: "system inside messages", 129: "30 MB body", 130: "ping during prefill", 131: "overload",
    132: "tool schema extras", 133: "invalid tool arguments", 134: "metadata.user_id",
}


def test_every_case_has_a_test():
    assert sorted(CASES) == list(range(1, 135))
    tested = set()
    for file in Path(__file__).parent.glob("*_test.py"):
        tested |= {int(number) for number in re.findall(r"^def test_c(\d{3})_", file.read_text(), re.MULTILINE)}
    missing = [f"{number} ({name})" for number, name in CASES.items() if number not in tested]
    assert not missing, f"cases without a test: {missing}"
    assert tested <= set(CASES)
