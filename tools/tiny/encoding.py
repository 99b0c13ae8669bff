"""Renders OpenAI-style messages into a DeepSeek-V4 prompt, exactly as the official encoder does.

The training data, the evaluation and the published encoding vectors (test_tiny.py) go through this file. Rendering
yields segments (text, is_target): targets are what an assistant is trained to say, end-of-sentence included. A segment
never splits between special tokens, so segments may be tokenized one by one.
"""
import json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
REMINDER = "<｜latest_reminder｜>"
DSML = "｜DSML｜"
TASKS = {t: f"<｜{t}｜>" for t in ("action", "query", "authority", "domain", "title", "read_url")}

EFFORT_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n")

EFFORT_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n")

TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def tools_block(tools):
    return TOOLS_HEAD + "\n".join(dumps(t["function"]) for t in tools) + TOOLS_TAIL


def render_tool_calls(calls):
    """The block an assistant writes to call tools; a call is {"function": {"name", "arguments": JSON text}}."""
    invokes = []
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        lines = []
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            text = value if is_string else dumps(value)
            lines.append(f'<{DSML}parameter name="{key}" string="{"true" if is_string else "false"}">'
                         f"{text}</{DSML}parameter>")
        name = call["function"]["name"]
        invokes.append(f'<{DSML}invoke name="{name}">\n' + "\n".join(lines) + f"\n</{DSML}invoke>")
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(invokes) + f"\n</{DSML}tool_calls>"


def _merge(messages):
    """Tool results become user blocks; neighbouring user turns become one, unless the first carries a task."""
    merged = []
    for message in messages:
        role = message["role"]
        if role not in ("tool", "user"):
            merged.append(dict(message))
            continue
        text = message.get("content") or ""
        block = f"<tool_result>{text}</tool_result>" if role == "tool" else text
        last = merged[-1] if merged else None
        if last is not None and last["role"] == "user" and (role == "tool" or not last.get("task")):
            last["blocks"].append((message.get("tool_call_id"), block))
            last["task"] = last.get("task") or message.get("task")
        else:
            merged.append({"role": "user", "blocks": [(message.get("tool_call_id"), block)],
                           "task": message.get("task")})
    return merged


def _sort_results(merged):
    """Within one user turn tool results follow the order of the calls that they answer."""
    order = {}
    for message in merged:
        if message["role"] == "assistant" and message.get("tool_calls"):
            order = {c.get("id"): i for i, c in enumerate(message["tool_calls"])}
        elif message["role"] == "user" and order:
            slots = [i for i, (_, b) in enumerate(message["blocks"]) if b.startswith("<tool_result>")]
            ranked = sorted((message["blocks"][i] for i in slots), key=lambda b: order.get(b[0], 0))
            for slot, block in zip(slots, ranked):
                message["blocks"][slot] = block


def _body(message):
    role = message["role"]
    if role == "user":
        return USER + "\n\n".join(b for _, b in message["blocks"])
    text = message.get("content") or ""
    if message.get("tools"):
        text += "\n\n" + tools_block(message["tools"])
    return {"system": "", "developer": USER, "latest_reminder": REMINDER}[role] + text


def segments(messages, thinking=False, drop_thinking=True, prefix=""):
    """[(text, is_target)] of a conversation. prefix: the reasoning-effort text, thinking mode only."""
    drop = drop_thinking and not any(m.get("tools") for m in messages)
    merged = _merge(messages)
    _sort_results(merged)
    last_user = max((i for i, m in enumerate(merged) if m["role"] in ("user", "developer")), default=-1)
    if thinking and drop:
        merged = [m for i, m in enumerate(merged) if m["role"] != "developer" or i >= last_user]
        last_user = max((i for i, m in enumerate(merged) if m["role"] in ("user", "developer")), default=-1)
    out = [(BOS + (prefix if thinking else ""), False)]
    for i, message in enumerate(merged):
        if message["role"] == "assistant":
            text = ""
            if thinking and (not drop or i > last_user) and not (i and merged[i - 1].get("task")):
                text = (message.get("reasoning_content") or "") + END_THINK
            text += message.get("content") or ""
            if message.get("tool_calls"):
                text += render_tool_calls(message["tool_calls"])
            out.append((text + EOS, True))
            continue
        out.append((_body(message), False))
        following = merged[i + 1]["role"] if i + 1 < len(merged) else "assistant"
        if following not in ("assistant", "latest_reminder"):
            continue
        mark = THINK if thinking and (not drop or i >= last_user) else END_THINK
        if message.get("task") == "action":
            out.append((ASSISTANT + mark + TASKS["action"], False))
        elif message.get("task"):
            out.append((TASKS[message["task"]], False))
        elif message["role"] in ("user", "developer"):
            out.append((ASSISTANT + mark, False))
    return _joined(out)


def _joined(parts):
    """Neighbouring parts of one kind as one: between them is no special token that would keep them apart."""
    out = []
    for text, is_target in parts:
        if out and out[-1][1] == is_target:
            out[-1] = (out[-1][0] + text, is_target)
        else:
            out.append((text, is_target))
    return out


def with_tools(messages, tools):
    """Request-level tools go onto the leading system message, or onto an empty one put before all."""
    if not tools:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "tools": tools}] + messages[1:]
    return [{"role": "system", "content": "", "tools": tools}] + messages


def render(messages, **options):
    return "".join(text for text, _ in segments(messages, **options))
