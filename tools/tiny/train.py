"""Trains fathom-tiny on one GPU, in pieces: state goes to a memory-backed folder, what is worth keeping to --out.

    python train.py --steps 6000 --minutes 9 --state /dev/shm/tiny --out OUT_FOLDER --tokenizer tokenizer.json

A run stops after --minutes and the next one goes on from --state; or from --resume, an earlier --out or a checkpoint
folder, when the state is gone. Files in --out stay below 16 MiB each.
"""
import argparse
import json
import pathlib
import time

import torch
from tokenizers import Tokenizer

import batches
import model as tiny
import scoring
from config import CONFIG
from export import load_masters, save_masters
from optimizer import Optimizer, balance

INDEX_LOSS, DRAFT_LOSS = 0.5, 0.3
SELECT_FROM = 0.35  # share of the steps after which attention sees only the indexer's choice


def rate(step, total):
    """Warm up, hold, then fall linearly to 2% over the last 45%."""
    return min(1.0, (step + 1) / 100, max(0.02, (total - step) / (0.45 * total)))


def train_step(model, masters, optimizer, ids, weight, step, total):
    w = tiny.prepare(masters)
    for value in w.values():
        if value.is_floating_point():
            value.requires_grad_(True)
    options = tiny.Options(select=step >= SELECT_FROM * total)
    main, draft, index, chosen = model.losses(w, ids, weight, options)
    (main + DRAFT_LOSS * draft + INDEX_LOSS * index).backward()
    grads = {n: v.grad for n, v in w.items() if v.is_floating_point() and v.grad is not None}
    optimizer.step(masters, grads, rate(step, total))
    balance(masters, chosen)
    return torch.stack((main.detach(), draft.detach(), index.detach()))


def report(model, masters, tokenizer, count):
    w = tiny.prepare(masters)
    for name, (exact, loss, agree) in scoring.table(model, w, tokenizer, count).items():
        print(f"  {name:12s} exact {exact:.3f} loss {loss:.4f} draft {agree:.3f}", flush=True)
    quantized = scoring.held_out_loss(model, w, tokenizer, tiny.Options())
    plain = scoring.held_out_loss(model, tiny.prepare(masters, quantize=False), tokenizer, tiny.Options(quantize=False))
    print(f"  held-out loss {quantized:.4f} quantized, {plain:.4f} in BF16: {quantized / plain - 1:+.2%}", flush=True)


def checkpoint(args, masters, optimizer, step):
    torch.save({"masters": masters, "optimizer": optimizer.state_dict(), "step": step}, args.state + ".new")
    pathlib.Path(args.state + ".new").rename(args.state)
    save_masters(masters, args.out)


def start(args, device):
    """(masters, optimizer, step) from the state, from --resume, or new."""
    if pathlib.Path(args.state).exists():
        saved = torch.load(args.state, map_location=device)
        optimizer = Optimizer(saved["masters"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["masters"], optimizer, saved["step"]
    masters = load_masters(args.resume) if args.resume else tiny.initialize(CONFIG, args.seed)
    masters = {n: v.to(device) for n, v in masters.items()}
    return masters, Optimizer(masters), args.start


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--state", default="/dev/shm/fathom-tiny.pt")
    p.add_argument("--out", required=True)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--resume", default="")
    p.add_argument("--start", type=int, default=0, help="first step, with --resume")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--workers", type=int, default=14)
    p.add_argument("--evaluate-every", type=int, default=1000)
    p.add_argument("--cases", type=int, default=64)
    p.add_argument("--eager", action="store_true", help="without torch.compile")
    return p.parse_args()


def main():
    args, began = arguments(), time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.recompile_limit = 64
    torch.backends.cuda.matmul.allow_tf32 = True  # exact for BF16 inputs, which is all it sees
    tokenizer = Tokenizer.from_file(args.tokenizer)
    masters, optimizer, step = start(args, device)
    model = tiny.Model(CONFIG, device, compiled=not args.eager and device == "cuda")
    plain = tiny.Model(CONFIG, device)
    log, mark, done = [], time.time(), step
    for ids, weight in batches.stream(args.tokenizer, args.seed, step, args.steps, args.workers):
        ids = torch.from_numpy(ids).to(device).long()
        log.append(train_step(model, masters, optimizer, ids, torch.from_numpy(weight).to(device).float(), step, args.steps))
        step += 1
        if step % 50 == 0 or step - done in (1, 5, 20):
            a, b, c = torch.stack(log).mean(0).tolist()
            seconds, log = (time.time() - mark) / len(log), []
            print(json.dumps({"step": step, "loss": round(a, 4), "draft": round(b, 4), "index": round(c, 4),
                              "ms": round(seconds * 1000), "length": ids.shape[1], "s": round(time.time() - began)}), flush=True)
            mark = time.time()
        if step % args.evaluate_every == 0 and step < args.steps:
            report(plain, masters, tokenizer, args.cases)
            checkpoint(args, masters, optimizer, step)
            mark = time.time()
        if time.time() - began > args.minutes * 60:
            break
    checkpoint(args, masters, optimizer, step)
    report(plain, masters, tokenizer, args.cases)


if __name__ == "__main__":
    main()
