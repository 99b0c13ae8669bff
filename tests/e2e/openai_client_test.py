"""The official OpenAI client, unmodified, as its users write it."""

import concurrent.futures

import openai
import pytest

STORY = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"temperature": 0, "max_tokens": 40}
THINK = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}


def content_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_lists_and_retrieves_models(client, model):
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_answers_a_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=STORY, **GREEDY)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 40
    assert answer.model == model and answer.object == "chat.completion"


def test_streams_the_same_chat_with_usage(client, model):
    whole = client.chat.completions.create(model=model, messages=STORY, **GREEDY)
    chunks = list(client.chat.completions.create(model=model, messages=STORY, stream=True,
                                                 stream_options={"include_usage": True}, **GREEDY))
    assert content_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    finished = [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert finished == [whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_streaming_helper_of_the_client(client, model):
    with client.chat.completions.stream(model=model, messages=STORY, **GREEDY) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "content.delta")
        snapshot = stream.current_completion_snapshot
    assert streamed and snapshot.choices[0].message.content == streamed


def test_thinking_goes_to_its_own_field(client, model):
    off = client.chat.completions.create(model=model, messages=STORY, **GREEDY)
    assert not hasattr(off.choices[0].message, "reasoning")
    on = client.chat.completions.create(model=model, messages=STORY, **GREEDY, **THINK)
    message = on.choices[0].message
    assert message.reasoning and message.reasoning == message.reasoning_content
    assert "</think>" not in message.reasoning + (message.content or "")
    assert on.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(client.chat.completions.create(model=model, messages=STORY, stream=True, **GREEDY, **THINK))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert content_of(chunks) == (message.content or "")


def test_the_standard_effort_field_turns_thinking_on(client, model):
    on = client.chat.completions.create(model=model, messages=STORY, reasoning_effort="high", **GREEDY)
    assert on.choices[0].message.reasoning
    off = client.chat.completions.create(model=model, messages=STORY, reasoning_effort="none", **GREEDY)
    assert off.choices[0].message.content and not hasattr(off.choices[0].message, "reasoning")


def test_stops_at_stop_strings(client, model):
    text = client.chat.completions.create(model=model, messages=STORY, **GREEDY).choices[0].message.content
    middle = len(text) // 2
    stop = text[middle:middle + 6]
    cut = text[:text.index(stop)]
    answer = client.chat.completions.create(model=model, messages=STORY, stop=["never in it", stop], **GREEDY)
    assert answer.choices[0].message.content == cut
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == stop
    stream = client.chat.completions.create(model=model, messages=STORY, stop=stop, stream=True, **GREEDY)
    assert content_of(stream) == cut


def test_gives_several_choices(client, model):
    answer = client.chat.completions.create(model=model, messages=STORY, n=3, seed=1, max_tokens=16)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_the_same_seed_gives_the_same_text(client, model):
    texts = [client.chat.completions.create(model=model, messages=STORY, seed=7, max_tokens=24)
             .choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1]


def seeded(client, model, seed, n=1):
    answer = client.chat.completions.create(model=model, messages=STORY, seed=seed, n=n, temperature=1,
                                            max_tokens=24, logprobs=True)
    return [(choice.message.content, [token.logprob for token in choice.logprobs.content])
            for choice in answer.choices]


def test_several_choices_are_to_the_last_bit_what_their_seeds_give_alone(client, model):
    alone = [seeded(client, model, seed)[0] for seed in (5, 6, 7, 8)]
    assert seeded(client, model, 5, n=4) == alone
    assert len({text for text, _ in alone}) > 1


def test_a_seed_gives_the_same_text_beside_other_requests(client, model):
    seeds = range(20, 28)
    alone = [seeded(client, model, seed)[0] for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
        together = list(pool.map(lambda seed: seeded(client, model, seed)[0], seeds))
    assert together == alone


def test_shows_logprobs(client, model):
    answer = client.chat.completions.create(model=model, messages=STORY, logprobs=True, top_logprobs=5, **GREEDY)
    entries = answer.choices[0].logprobs.content
    content = bytes(byte for entry in entries for byte in entry.bytes).decode(errors="replace")
    assert content == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy: the best one
        assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda top: -top.logprob)


def test_continues_a_prefix(client, model):
    messages = [*STORY, {"role": "assistant", "content": "Once upon a time", "prefix": True}]
    answer = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert not answer.choices[0].message.content.startswith("Once upon a time")


def test_answers_many_at_once_as_it_answers_one(client, model):
    def ask(_):
        return client.chat.completions.create(model=model, messages=STORY, **GREEDY).choices[0].message.content

    alone = ask(0)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(16))) == {alone}


def test_completes_text(client, model):
    answer = client.completions.create(model=model, prompt="Once upon a time", **GREEDY)
    assert answer.choices[0].text and answer.object == "text_completion"
    stream = client.completions.create(model=model, prompt="Once upon a time", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    echoed = client.completions.create(model=model, prompt="Once upon a time", echo=True, **GREEDY)
    assert echoed.choices[0].text == "Once upon a time" + answer.choices[0].text
    assert answer.usage.prompt_tokens == echoed.usage.prompt_tokens


def test_completes_batches_and_token_ids(client, model, http):
    ids = http.post("/tokenize", {"prompt": "Once upon a time"}).json["tokens"]
    answer = client.completions.create(model=model, prompt=["Once upon a time", "The dog"], n=1, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    by_ids = client.completions.create(model=model, prompt=ids, **GREEDY)
    assert by_ids.choices[0].text == answer.choices[0].text
    assert by_ids.usage.prompt_tokens == len(ids)


def test_errors_are_the_clients_own_types(client, model):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=STORY)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=STORY, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 200_000}])
    assert long.value.code == "context_length_exceeded"
