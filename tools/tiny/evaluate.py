"""Measures what fathom-tiny can do on held-out cases, greedily.

    python evaluate.py --url http://127.0.0.1:8000                  # through a running server's HTTP API
    python evaluate.py --torch ../../models/fathom-tiny             # with the PyTorch model
    python evaluate.py --torch ../../models/fathom-tiny --breaks    # what each deliberate fault does

Through the API answers are generated and checked by content: a tool's name and arguments, the number of a sum, the
value of a needle, the whole text elsewhere. In PyTorch they are teacher-forced: a case counts when every token of the
expected answer, reasoning included, is the most likely one, which is what greedy decoding would write.
"""
import argparse
import concurrent.futures
import itertools
import json
import re
import statistics
import urllib.request

import data

GOALS = {"tools": 0.95, "sums": 0.95, "needle_2k": 0.95, "needle_8k": 0.85, "stops": 0.99}


def correct(expect, text, calls):
    """Whether an answer's content is right, whatever its wording."""
    kind = expect.get("kind")
    if kind == "tool":
        return len(calls) == 1 and calls[0] == (expect["name"], expect["arguments"])
    if kind == "sum":
        numbers = re.findall(r"-?\d+", text.replace(" - ", " minus "))
        return bool(numbers) and int(numbers[-1]) == expect["value"]
    if kind == "needle":
        return expect["value"] in text
    return text.strip() == expect["answer"].strip()


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def ask(url, model, case, limit):
    """(text, calls, finish reason, reasoning) of one case."""
    body = {"model": model, "temperature": 0, "max_tokens": limit}
    if "prompt" in case:
        choice = post(url, "/v1/completions", body | {"prompt": case["prompt"], "max_tokens": len(case["expect"]["answer"])})
        return choice["choices"][0]["text"], [], "stop"
    body |= {"messages": case["messages"], "chat_template_kwargs": {"thinking": case["thinking"]}, "reasoning_effort": "low"}
    if not case["thinking"]:
        body.pop("reasoning_effort")
    if case["tools"]:
        body["tools"] = case["tools"]
    choice = post(url, "/v1/chat/completions", body)["choices"][0]
    said = choice["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in said.get("tool_calls") or ()]
    return said.get("content") or "", calls, choice["finish_reason"]


def through_api(urls, abilities, count, limit, clients):
    with urllib.request.urlopen(urls[0] + "/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    stopped = asked = 0
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for ability in abilities:
            cases = data.cases(ability, count)
            answers = list(pool.map(lambda case, url: ask(url, model, case, limit), cases, itertools.cycle(urls)))
            if ability != "stories":
                line(ability, statistics.mean(correct(c["expect"], text, calls) for c, (text, calls, _) in zip(cases, answers)))
            if cases[0]["messages"]:
                stopped, asked = stopped + sum(a[2] in ("stop", "tool_calls") for a in answers), asked + count
    if asked:
        line("stops", stopped / asked)


def line(ability, share):
    goal = GOALS.get(ability)
    print(f"{ability:14s} {share:7.1%}" + (f"   goal {goal:.0%} {'met' if share >= goal else 'MISSED'}" if goal else ""), flush=True)


def break_weights(w, name):
    """scale: expert 0 of each layer counts double."""
    if name != "scale":
        return w
    return {n: v * (1 + (v.new_ones(len(v), 1, 1).cumsum(0) == 1)) if n.endswith("experts.w2") else v for n, v in w.items()}


def with_torch(folder, abilities, count, breaks, threads):
    import torch
    from tokenizers import Tokenizer

    import export
    import model as tiny
    import scoring
    from config import CONFIG
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    w = {n: v.to(device) for n, v in export.prepared(folder).items()}
    model = tiny.Model(CONFIG, device)
    base = {}
    for name in ["none"] + (["index", "window", "stream", "rope", "scale"] if breaks else []):
        options = tiny.Options(breaks=[name])
        broken = break_weights(w, name)
        print(f"fault: {name}; held-out loss {scoring.held_out_loss(model, broken, tokenizer, options):.4f}")
        for ability in abilities:
            exact, loss, agree = scoring.teacher_forced(model, broken, tokenizer, data.cases(ability, count), options)
            seen = "" if name == "none" else f" ({exact - base[ability][0]:+.1%}, loss {loss - base[ability][1]:+.4f})"
            base.setdefault(ability, (exact, loss))
            print(f"  {ability:14s} exact {exact:6.1%}  loss {loss:.4f}  draft {agree:6.1%}{seen}", flush=True)
    if breaks:
        return
    prompts = [c for a in ("tools", "sums", "chat", "stories") for c in data.cases(a, max(4, count // 4))]
    print(f"stops by itself {stops(model, w, tokenizer, prompts):.1%} of {len(prompts)}")


def stops(model, w, tokenizer, cases):
    import batches
    import scoring
    from model import Options
    prompts = [batches.tokenized(tokenizer, data.rendered(c, answered=False))[0] for c in cases]
    return statistics.mean(done for _, done in scoring.generate(model, w, prompts, Options(), limit=240))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a server, or of several that share the cases, with commas between them")
    where.add_argument("--torch", metavar="FOLDER")
    p.add_argument("--cases", type=int, default=200)
    p.add_argument("--abilities", default="tools,renamed_tools,tool_result,sums,needle_2k,needle_8k,passage,chat,stories,"
                   "echo_128,echo_256,echo_512")
    p.add_argument("--breaks", action="store_true")
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--threads", type=int, default=2, help="of PyTorch")
    p.add_argument("--clients", type=int, default=4, help="requests at a time, with --url")
    args = p.parse_args()
    abilities = args.abilities.split(",")
    if args.url:
        through_api([u.rstrip("/") for u in args.url.split(",")], abilities, args.cases, args.max_tokens, args.clients)
    else:
        with_torch(args.torch, abilities, args.cases, args.breaks, args.threads)


if __name__ == "__main__":
    main()
