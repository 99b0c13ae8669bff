"""Training conversations and held-out cases, all generated from seeds: nothing is downloaded.

conversation() gives messages with options for encoding.segments(); batches() tokenized rows with a weight a token;
cases() the held-out questions that evaluate.py asks. Training seeds are non-negative integers; held-out seeds are
strings, and the sums asked there are kept out of training altogether (tasks.held_out).
"""
import itertools
import random

import catalog
import encoding
import stories
import tasks

SYSTEMS = ["You are a helpful assistant.", "You are Fathom Tiny, a helpful assistant.", "Answer in short sentences.",
           "You are a friendly assistant.", "Be brief and correct.", "Help the user with simple questions."]
READ = ["Read this text.", "Here is a text.", "Read the text and answer.", "Text:", "Answer from the text below."]
CHARACTERS_PER_TOKEN = 4.3  # of the trained tokenizer on this data; only decides how much to generate
HAYSTACK_CHARACTERS_PER_TOKEN = 4.5

# ability -> share of conversations. Long rows hold only what needs the length.
SHORT = {"chat": 25, "sums": 12, "tools": 25, "passage": 20, "needle": 10, "text": 6, "echo": 6}
LONG = {"chat": 8, "sums": 2, "tools": 20, "passage": 24, "needle": 34, "text": 3, "echo": 12}


def pick(rng, shares):
    return rng.choices(list(shares), list(shares.values()))[0]


def chat_turn(rng):
    make = rng.choices((tasks.fact_turn, tasks.talk_turn, tasks.story_turn, tasks.list_turn, tasks.json_turn,
                        tasks.compare_turn, tasks.sum_turn), (34, 10, 14, 18, 7, 6, 11))[0]
    return make(rng)


def say(turn, number):
    """The messages of one turn: user, assistant, and with a tool its result and the final answer."""
    out = [{"role": "user", "content": turn.user}]
    if turn.calls:
        made = [{"id": f"call_{number}_{i}", "type": "function",
                 "function": {"name": name, "arguments": encoding.dumps(arguments)}}
                for i, (name, arguments, _) in enumerate(turn.calls)]
        out.append({"role": "assistant", "reasoning_content": turn.call_reasoning, "content": "", "tool_calls": made})
        out += [{"role": "tool", "tool_call_id": c["id"], "content": encoding.dumps(result)}
                for c, (_, _, result) in zip(made, turn.calls)]
    out.append({"role": "assistant", "reasoning_content": turn.reasoning, "content": turn.answer})
    return out


def opening(rng, tools=None):
    system = ""
    if rng.random() < 0.5:
        system = rng.choice(SYSTEMS) if rng.random() < 0.7 else stories.filler(rng)
    return encoding.with_tools([{"role": "system", "content": system}] if system else [], tools)


def offer(rng):
    """One to four tools, in random order, some under other names."""
    drawn = rng.sample(catalog.TOOLS, rng.choice((1, 2, 3, 3, 4, 4)))
    return [catalog.renamed(rng, t) if rng.random() < 0.3 else t for t in drawn]


def tool_use(rng, offered):
    draw = rng.random()
    if draw < 0.08 and len(offered) > 1:
        return tasks.two_tools_turn(rng, *rng.sample(offered, 2))
    if draw < 0.82:
        return tasks.tool_turn(rng, rng.choice(offered))
    if draw < 0.90:
        return tasks.missing_tool_turn(rng, rng.choice(catalog.others(offered)))
    return chat_turn(rng)


def turns(rng, kind, characters):
    """Yields turns for one conversation without end; the first of a passage or needle holds the text."""
    if kind in ("chat", "sums"):
        ask = None
        if kind == "chat" and rng.random() < 0.3:
            told, ask = tasks.introduction(rng)
            yield told
        while True:
            if ask and rng.random() < 0.2:
                yield ask(rng)
            yield chat_turn(rng) if kind == "chat" or rng.random() < 0.15 else tasks.sum_turn(rng)
    questions = 3 + characters // 1200
    if kind == "passage":
        crowd = tasks.people(rng, max(2, min(36, int((characters - 50 * questions) / 190))))
        text = " ".join(tasks.passage(rng, crowd))
        asked = (tasks.passage_turn(rng, crowd) for _ in iter(int, 1))
    else:
        hidden = tasks.needles(rng, rng.choice((1, 2, questions, questions)))
        text = tasks.haystack(rng, [h[1] for h in hidden], max(200, characters - 130 * len(hidden)))
        asked = (tasks.needle_turn(h) for h in itertools.cycle(rng.sample(hidden, len(hidden))))
    first = next(asked)
    if rng.random() < 0.7:
        first.user = f"{rng.choice(READ)}\n\n{text}\n\n{first.user}"
    else:
        first.user = f"{first.user}\n\n{text}"
    yield first
    yield from asked


def conversation(rng, kind, characters):
    """(messages, options) of about that many characters."""
    thinking = rng.random() < (0.8 if kind == "sums" else 0.5)
    offered = offer(rng) if kind == "tools" else None
    messages = opening(rng, [t.schema() for t in offered] if offered else None)
    size = len(encoding.render(messages)) if messages else 0
    keep_reasoning = rng.random() < 0.6
    made = None if offered else turns(rng, kind, characters - size)
    while size < characters:
        said = say(tool_use(rng, offered) if offered else next(made), len(messages))
        messages += said
        shown = said if thinking and (offered or keep_reasoning) else [{**m, "reasoning_content": ""} for m in said]
        size += sum(len(m.get("content") or "") + len(m.get("reasoning_content") or "") + 14 for m in shown)
        size += 200 * sum(len(m.get("tool_calls") or ()) for m in said)
    effort = rng.choices(("", encoding.EFFORT_ABSOLUTE, encoding.EFFORT_BEYOND), (78, 16, 6))[0]
    return messages, {"thinking": thinking, "drop_thinking": not keep_reasoning, "prefix": effort}


def plain_text(rng, characters):
    """Stories one after another, without any chat."""
    parts = []
    while sum(map(len, parts)) < characters:
        parts.append(stories.story(rng, stories.cast(rng)))
    return [(encoding.BOS, False)] + [(p + encoding.EOS, True) for p in parts]


def row(rng, length):
    """Segments that fill about `length` tokens."""
    kind = pick(rng, LONG if length > 1024 else SHORT)
    if kind == "echo" and length >= 480:
        period = rng.choice((128, 256, 512, 512, 512) if length > 1024 else (128, 256))
        head, rest = tasks.echo(rng, period, min(length, 2048) - period - 24)
        return [(encoding.BOS + head, False), (rest, True)]
    if kind == "echo":
        kind = "passage"
    characters = int(length * CHARACTERS_PER_TOKEN * rng.uniform(0.85, 1.0))
    if kind == "text":
        return plain_text(rng, characters)
    messages, options = conversation(rng, kind, characters)
    return encoding.segments(messages, **options)


# ---- held-out cases --------------------------------------------------------------------------------------------------

def case(turn, messages, thinking, tools=None):
    """expect: what the final assistant turn must say."""
    return {"messages": messages + [{"role": "user", "content": turn.user}], "tools": tools, "thinking": thinking,
            "expect": {"answer": turn.answer, "reasoning": turn.call_reasoning or turn.reasoning, **turn.facts}}


def needle_case(rng, length):
    item = tasks.needles(rng, 1)[0]
    turn = tasks.needle_turn(item)
    text = tasks.haystack(rng, [item[1]], int((length - 60) * HAYSTACK_CHARACTERS_PER_TOKEN))
    turn.user = f"{rng.choice(READ)}\n\n{text}\n\n{turn.user}"
    return case(turn, [], thinking=False)


def cases(ability, count, seed="held out"):
    """Held-out cases of one ability: tools, renamed_tools, tool_result, sums, needle_2k, needle_8k, passage, chat, stories;
    and echo_128, echo_256, echo_512, which are plain prompts."""
    out = []
    for i in range(count):
        rng = random.Random(f"{seed}/{ability}/{i}")
        if ability.startswith("echo"):
            head, rest = tasks.echo(rng, int(ability[5:]), 32)
            out.append({"prompt": head, "messages": None, "thinking": False, "tools": None, "expect": {"answer": rest}})
            continue
        if ability in ("tools", "tool_result", "renamed_tools"):
            offered = rng.sample(catalog.TOOLS, rng.choice((2, 3, 4)))
            if ability == "renamed_tools":
                offered = [catalog.renamed(rng, t) for t in offered]
            tools = [t.schema() for t in offered]
            turn = tasks.tool_turn(rng, rng.choice(offered))
            new = case(turn, [{"role": "system", "content": rng.choice(SYSTEMS)}] if i % 2 else [], i % 4 < 2, tools)
            if ability == "tool_result":
                said = say(turn, 0)
                new["messages"] = new["messages"][:-1] + said[:-1]
                new["expect"]["reasoning"], new["expect"]["kind"] = turn.reasoning, "text"
        elif ability == "sums":
            new = case(tasks.sum_turn(rng, evaluation=True, sign="+-"[i % 2]), [], True)
        elif ability.startswith("needle"):
            new = needle_case(rng, 2048 if ability == "needle_2k" else 8192)
        elif ability == "passage":
            crowd = tasks.people(rng, rng.randint(3, 8))
            turn = tasks.passage_turn(rng, crowd)
            turn.user = f"{rng.choice(READ)}\n\n{' '.join(tasks.passage(rng, crowd))}\n\n{turn.user}"
            new = case(turn, [], i % 2 == 0)
        else:
            turn = tasks.story_turn(rng) if ability == "stories" else tasks.fact_turn(rng)
            new = case(turn, [], i % 2 == 0)
        out.append(new)
    return out


def expected(case):
    """The assistant turn that a case asks for, as the messages to render."""
    expect = case["expect"]
    turn = {"role": "assistant", "reasoning_content": expect["reasoning"], "content": expect["answer"]}
    if expect.get("kind") == "tool":
        turn["content"] = ""
        turn["tool_calls"] = [{"function": {"name": expect["name"], "arguments": encoding.dumps(expect["arguments"])}}]
    return turn


def rendered(case, answered):
    """Segments of a case's prompt, with the expected answer if wanted."""
    if "prompt" in case:
        return [(encoding.BOS + case["prompt"], False)] + [(case["expect"]["answer"], True)] * answered
    messages = encoding.with_tools(case["messages"], case["tools"])
    return encoding.segments(messages + [expected(case)] if answered else messages, thinking=case["thinking"])
