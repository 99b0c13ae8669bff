"""Trains a DSpark draft for a finished fathom-tiny: the target is frozen, only mtp.* tensors are learned.

    python dspark.py --model MODEL_FOLDER --out OUT_FOLDER --steps 1500

For random anchors p of a row the draft sees what the target held at p-127..p (its own window entries of main_p) and a
block of t_{p+1} and noise tokens; it predicts t_{p+2} ... at once, chained by the Markov head on the true tokens.
"""
import argparse
import pathlib
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import batches
import data
import export
import model as tiny
import scoring
from config import CONFIG, DSPARK
from model import HEAD, STREAMS, WINDOW, block_weights, rms_norm
from optimizer import Optimizer, balance

ANCHORS = 4096  # draft blocks a step
BLOCK, STAGES, RANK = DSPARK["dspark_block_size"], DSPARK["n_mtp_layers"], DSPARK["dspark_markov_rank"]
TARGETS, NOISE = DSPARK["dspark_target_layer_ids"], DSPARK["dspark_noise_token_id"]
LAST = f"mtp.{STAGES - 1}."


def initialize(c, seed):
    """Masters of the draft under their official names."""
    h, v = c["hidden_size"], c["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    alike = tiny.initialize(c, seed)
    out = {}
    for stage in range(STAGES):
        fresh = tiny.initialize(c, seed + stage) if stage else alike
        out |= {n.replace("mtp.0.", f"mtp.{stage}."): x for n, x in fresh.items()
                if n.startswith("mtp.0.") and n.split(".")[2] not in
                ("e_proj", "h_proj", "enorm", "hnorm", "norm", "hc_head_fn", "hc_head_base", "hc_head_scale")}
    for n in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"):
        out[LAST + n] = alike["mtp.0." + n]
    wide = len(TARGETS) * h
    out["mtp.0.main_proj.weight"] = torch.randn(h, wide, generator=generator) / wide**0.5
    out["mtp.0.main_norm.weight"] = torch.ones(h)
    out[LAST + "markov_head.markov_w1.weight"] = torch.randn(v, RANK, generator=generator) * 0.1
    out[LAST + "markov_head.markov_w2.weight"] = torch.zeros(v, RANK)
    out[LAST + "confidence_head.proj.weight"] = torch.zeros(1, h + RANK)
    return out


def attend(q, kv, context, seen, sink):
    """q [M, B, heads, 512] over context [M, 128, 512] (seen [M, 128]) and the block's own kv [M, B, 512]."""
    keys = torch.cat((context, kv), 1)
    logits = torch.einsum("mbhd,mkd->mbhk", q, keys).float() * HEAD**-0.5
    allowed = F.pad(seen, (0, kv.shape[1]), value=True)[:, None, None]
    logits = logits.masked_fill(~allowed, -1e30)
    p = torch.cat((logits, sink.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("mbhk,mkd->mbhd", p.to(q.dtype), keys)


def window_entries(main, w, cos, sin):
    kv = F.linear(tiny.q8(main, True), w["attn.wkv.weight"])
    return tiny.quantize_entry(tiny.rotate(rms_norm(kv, w["attn.kv_norm.weight"]), cos, sin))


def hidden(model, w, kept, tokens, rows, at):
    """The last stage's collapsed streams [M * B, H]; anchor m is position at[m] of row rows[m]."""
    c, count, length = model.c, len(rows), tokens.shape[1]
    main = F.linear(tiny.q8(torch.cat([kept[n] for n in TARGETS], -1), True), w["mtp.0.main_proj.weight"])
    main = rms_norm(main, w["mtp.0.main_norm.weight"])
    cos, sin, cos_n, sin_n = model.rope(tokens.shape[0], length + 128, False)
    past = at[:, None] + torch.arange(1 - WINDOW, 1, device=at.device)
    index = rows[:, None] * length + past.clamp_min(0)
    ids = torch.full((count, BLOCK), NOISE, device=at.device)
    ids[:, 0] = tokens[rows, at + 1]
    place = (at[:, None] + torch.arange(1, BLOCK + 1, device=at.device)).flatten()
    turn, spin = cos[place], sin[place]
    x = w["embed.weight"][ids.flatten()][:, None].expand(-1, STREAMS, -1).contiguous()
    masks = {}
    for stage in range(STAGES):
        s, late = tiny.split_weights(block_weights(w, f"mtp.{stage}."))
        own = window_entries(main, s, cos[:length].repeat(tokens.shape[0], 1), sin[:length].repeat(tokens.shape[0], 1))
        t = model.attention_in(x, s, turn, spin, model.had, True)
        o = attend(t["q"].unflatten(0, (count, BLOCK)), t["kv"].unflatten(0, (count, BLOCK)), own[index], past >= 0,
                   s["attn.attn_sink"])
        x, masks[f"mtp.{stage}."] = model.attention_out(
            x, o.flatten(0, 1), late, ids.flatten(), turn, spin, c["o_groups"], c["num_experts_per_tok"],
            c["routed_scaling_factor"], c["swiglu_limit"], True, t["post"], t["comb"])
    return tiny.collapse(x, {k: w[LAST + k] for k in ("hc_head_fn", "hc_head_base", "hc_head_scale")}), masks


def base_logits(w, y):
    return F.linear(rms_norm(y, w[LAST + "norm.weight"]), w["head.weight"])


def losses(model, w, kept, tokens, weight, rows, at):
    y, masks = hidden(model, w, kept, tokens, rows, at)
    index = at[:, None] + torch.arange(2, BLOCK + 2, device=at.device)
    target = tokens[rows[:, None], index].flatten()
    share = weight[rows[:, None], index].flatten()
    previous = tokens[rows[:, None], index - 1].flatten()
    markov = w[LAST + "markov_head.markov_w1.weight"][previous]
    logits = (base_logits(w, y) + F.linear(markov, w[LAST + "markov_head.markov_w2.weight"])).float()
    loss = (F.cross_entropy(logits, target, reduction="none") * share).sum() / (share.sum() + 1e-6)
    right = (logits.argmax(-1) == target).float()
    sure = torch.cat((y, markov), -1).detach().float() @ w[LAST + "confidence_head.proj.weight"].T
    confidence = F.binary_cross_entropy_with_logits(sure[:, 0], right, weight=share)
    return loss, confidence, (right * (share == 1)).view(-1, BLOCK).sum(0) / (share == 1).view(-1, BLOCK).sum(0), masks


def anchors(tokens, weight, generator):
    """Random positions whose whole block lies in the row, mostly where the assistant speaks."""
    rows, length = tokens.shape
    chance = (weight[:, 2:length - BLOCK] == 1).float() + 0.02
    drawn = torch.multinomial(chance.flatten(), ANCHORS, replacement=True, generator=generator)
    return drawn // chance.shape[1], drawn % chance.shape[1]


@torch.no_grad()
def acceptance(model, w, tokenizer, count):
    """{ability: tokens accepted of a block on average}: how long the drafts agree with held-out answers."""
    out = {}
    for ability in ("tools", "sums", "chat", "needle_2k", "stories"):
        total = blocks = 0
        for case in data.cases(ability, count):
            ids, weights = batches.tokenized(tokenizer, data.rendered(case, answered=True))
            start = next(i for i in range(len(weights) - 1, -1, -1) if weights[i] < 1)
            tokens = scoring.pad_rows([ids + [1] * (BLOCK + 2)], model.device)
            kept = {n: None for n in TARGETS}
            model.streams(w, tokens, tiny.Options(), keep=kept)
            at = torch.arange(start - 1, len(ids) - 2, device=model.device)
            y, _ = hidden(model, w, kept, tokens, torch.zeros_like(at), at)
            base, token = base_logits(w, y).unflatten(0, (-1, BLOCK)), tokens[0, at + 1]
            alive, accepted = torch.ones_like(at, dtype=torch.bool), torch.zeros_like(at)
            for i in range(BLOCK):
                markov = w[LAST + "markov_head.markov_w1.weight"][token]
                token = (base[:, i] + F.linear(markov, w[LAST + "markov_head.markov_w2.weight"])).argmax(-1)
                alive &= token == tokens[0, at + 2 + i]
                accepted += alive & (at + 2 + i < len(ids))
            total, blocks = total + accepted.sum().item(), blocks + len(at)
        out[ability] = round(total / blocks, 3)
    return out


def rate(progress, step):
    """Warm up, hold, then fall linearly to 2% over the second half."""
    return min(1.0, (step + 1) / 50, max(0.02, 2 * (1 - progress)))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="the target's checkpoint folder")
    p.add_argument("--out", required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--workers", type=int, default=12)
    p.add_argument("--cases", type=int, default=24)
    args, began = p.parse_args(), time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.config.recompile_limit = 64
    torch.backends.cuda.matmul.allow_tf32 = True
    fixed = {n: v.to(device) for n, v in export.prepared(args.model).items() if not n.startswith("mtp.")}
    path = f"{args.model}/tokenizer.json"
    masters = {n: v.to(device) for n, v in initialize(CONFIG, args.seed).items()}
    optimizer, generator = Optimizer(masters), torch.Generator(device).manual_seed(args.seed)
    model, plain = tiny.Model(CONFIG, device, compiled=device == "cuda"), tiny.Model(CONFIG, device)
    short = batches.stream(path, args.seed, 0, args.steps * 10, args.workers)  # a schedule's start: short rows
    for step, (ids, weight) in zip(range(args.steps), short):
        tokens, weight = torch.from_numpy(ids).to(device).long(), torch.from_numpy(weight).to(device).float()
        kept = {n: None for n in TARGETS}
        with torch.no_grad():
            model.streams(fixed, tokens, tiny.Options(), keep=kept)
        learned = tiny.prepare(masters)
        for v in learned.values():
            v.requires_grad_(True)
        loss, confidence, right, masks = losses(model, fixed | learned, kept, tokens, weight, *anchors(tokens, weight, generator))
        (loss + 0.1 * confidence).backward()
        optimizer.step(masters, {n: v.grad for n, v in learned.items() if v.grad is not None},
                       rate(max(step / args.steps, (time.time() - began) / (60 * args.minutes)), step))
        balance(masters, masks)
        if step % 50 == 0:
            print(f"{step} loss {loss.item():.4f} confidence {confidence.item():.4f} right "
                  f"{[round(r, 3) for r in right.tolist()]} {time.time() - began:.0f} s", flush=True)
        if time.time() - began > args.minutes * 60:
            break
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    export.save_masters(masters, args.out)
    print(acceptance(plain, fixed | tiny.prepare(masters), Tokenizer.from_file(path), args.cases), flush=True)


if __name__ == "__main__":
    main()
