"""What fathom-tiny can do, measured with the PyTorch model on held-out cases."""
import random

import torch

import batches
import data
from batches import PAD_ID
from model import Options, head_weights

ABILITIES = ("tools", "renamed_tools", "tool_result", "sums", "needle_2k", "needle_8k", "passage", "chat", "stories",
             "echo_128", "echo_256", "echo_512")


def pad_rows(rows, device, fill=PAD_ID):
    """[rows, length] with length a multiple of 128."""
    length = -(-max(map(len, rows)) // 128) * 128
    return torch.tensor([r + [fill] * (length - len(r)) for r in rows], device=device)


def by_length(items, tokens):
    """Groups of items (ids first) of like length, each group within a budget of tokens."""
    group = []
    for item in sorted(items, key=lambda i: len(i[0])):
        if group and (len(group) + 1) * (len(item[0]) + 128) > tokens:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


@torch.no_grad()
def teacher_forced(model, w, tokenizer, cases, options, tokens=60000):
    """(share of cases whose every answer token is the most likely one, mean loss an answer token,
    share of answer tokens where the MTP draft agrees with the model). The first is what greedy decoding would write."""
    items = []
    for case in cases:
        ids, weights = batches.tokenized(tokenizer, data.rendered(case, answered=True))
        last = next(i for i in range(len(weights) - 1, -1, -1) if weights[i] < 1)
        items.append((ids, last + 1))
    exact = agree = count = 0
    loss = 0.0
    for group in by_length(items, tokens):
        rows = pad_rows([g[0] for g in group], model.device)
        logits, x = model.logits(w, rows, options)
        best = logits.argmax(-1)
        hidden, _ = model.draft(w, x, rows, options)
        draft = (hidden @ w["head.weight"].T).argmax(-1).view_as(rows)
        for r, (ids, start) in enumerate(group):
            target = rows[r, start:len(ids)]
            span = slice(start - 1, len(ids) - 1)
            exact += bool((best[r, span] == target).all())
            loss += torch.nn.functional.cross_entropy(logits[r, span].float(), target, reduction="sum").item()
            agree += (draft[r, start - 1:len(ids) - 2] == best[r, start:len(ids) - 1]).sum().item()
            count += len(target)
    return exact / len(cases), loss / count, agree / max(1, count - len(cases))


@torch.no_grad()
def held_out_loss(model, w, tokenizer, options, rows=24, length=2048):
    """Mean loss a target token on held-out conversations."""
    total = weight = 0.0
    for i in range(0, rows, 8):
        made = [batches.fill(tokenizer, random.Random(f"held out/text/{i + j}"), length) for j in range(8)]
        ids = torch.tensor([m[0] for m in made], device=model.device)
        wanted = torch.tensor([m[1] for m in made], device=model.device)[:, 1:].flatten() == 1
        logits, _ = model.logits(w, ids, options)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        total, weight = total + loss[wanted].sum().item(), weight + wanted.sum().item()
    return total / weight


@torch.no_grad()
def generate(model, w, prompts, options, limit=160, tokens=200000):
    """Greedy continuations (without end of sentence) and whether each stopped by itself; no cache, whole prefixes."""
    done = {}
    for group in by_length([(p, i) for i, p in enumerate(prompts)], tokens):
        rows, alive = [list(g[0]) for g in group], list(range(len(group)))
        for _ in range(limit):
            x = pad_rows([rows[a] for a in alive], model.device)
            at = torch.tensor([len(rows[a]) - 1 for a in alive], device=model.device)
            streams, _, _ = model.streams(w, x, options)
            last = streams.unflatten(0, x.shape)[torch.arange(len(alive), device=model.device), at]
            best = (model.hyper_head(last, head_weights(w)) @ w["head.weight"].T).argmax(-1).tolist()
            for a, token in zip(alive, best):
                rows[a].append(token)
            alive = [a for a in alive if rows[a][-1] != 1]
            if not alive:
                break
        for (ids, i), row in zip(group, rows):
            done[i] = ([t for t in row[len(ids):] if t != 1], row[-1] == 1)
    return [done[i] for i in range(len(prompts))]


def table(model, w, tokenizer, count, options=None, abilities=ABILITIES):
    """{ability: (exact share, loss, draft agreement)}."""
    options = options or Options()
    return {a: teacher_forced(model, w, tokenizer, data.cases(a, count), options) for a in abilities}
