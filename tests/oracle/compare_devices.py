#!/usr/bin/env python3
"""`fathom score` on a GPU against the CPU, which is the reference.

    python3 tests/oracle/compare_devices.py --binary build-cuda/fathom --model models/fathom-tiny

For every token: the log-probability of the CPU's likeliest next token, on both. Two correct
implementations take sums in another order; that moves some results by a unit of BF16, some of those
an FP8 code, and now and then a choice of experts or index entries. So each case is run twice: with
the choices of the CPU forced upon the GPU, where the difference is rounding alone, and free.

The CPU's results do not depend on chunks or batch. The GPU is run whole, in chunks, and with several
sequences at once. Needs torch or numpy for nothing but arrays.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

FORCED_LIMIT = 0.03  # the largest difference
FREE_LIMIT, FREE_SHARE = 0.05, 0.99  # of the tokens
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 63, 65, 127, 128, 129, 131, 255, 256, 257, 300)


def read_logits(path: Path) -> list[np.ndarray]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        tensors[int(name.removeprefix("logits."))] = np.frombuffer(
            data[begin:end], np.float32).reshape(info["shape"])
    return [tensors[i] for i in sorted(tensors)]


def score(args, folder: Path, name: str, *more: str) -> list[np.ndarray]:
    logits = folder / f"{name}.safetensors"
    command = [args.binary, "score", args.model, "--input", str(folder / "in.jsonl"),
               "--logits", str(logits), *more]
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr.strip()}")
    result = read_logits(logits)
    logits.unlink()
    print(f"  {name}: {time.time() - begin:.1f} s", flush=True)
    return result


def logprob(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x[np.arange(len(x)), tokens] - np.log(np.exp(x).sum(1))


def differences(cpu: list[np.ndarray], gpu: list[np.ndarray]) -> np.ndarray:
    out = []
    for a, b in zip(cpu, gpu, strict=True):
        best = a.argmax(1)
        out.append(np.abs(logprob(a, best) - logprob(b, best)))
    return np.concatenate(out)


def report(label: str, d: np.ndarray, forced: bool) -> bool:
    share = float((d <= FREE_LIMIT).mean())
    fine = float(d.max()) <= FORCED_LIMIT if forced else share >= FREE_SHARE
    print(f"  {label:28s} {'forced' if forced else 'free  '} median {np.median(d):.5f}  p90 "
          f"{np.quantile(d, .9):.5f}  p99 {np.quantile(d, .99):.5f}  largest {d.max():.5f}  within "
          f"{FREE_LIMIT} {100 * share:.2f}%  {'ok' if fine else 'FAILED'}", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")],
                        default=list(LENGTHS))
    parser.add_argument("--input", help="JSON lines of tokens instead of random ones")
    parser.add_argument("--runs", default="0/1,64/1,7/4,1/64",
                        help="chunk/batch of each run on the GPU; chunk 0: whole")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.input:
            text = Path(args.input).read_text()
        else:
            config = json.loads((Path(args.model) / "config.json").read_text())
            lists = [[draw.randrange(config["vocab_size"]) for _ in range(n)] for n in args.lengths]
            text = "".join(json.dumps({"tokens": tokens}) + "\n" for tokens in lists)
        (folder / "in.jsonl").write_text(text)
        trace = folder / "trace.safetensors"
        cpu = score(args, folder, "cpu", "--device", "cpu", "--trace", str(trace))
        good = True
        for run in args.runs.split(","):
            chunk, batch = run.split("/")
            more = ["--device", "cuda", "--batch", batch]
            more += [] if chunk == "0" else ["--chunk", chunk]
            label = f"chunk {chunk if chunk != '0' else 'whole'}, batch {batch}"
            for forced in (True, False):
                choices = ["--choices", str(trace)] if forced else []
                gpu = score(args, folder, f"gpu.{chunk}.{batch}", *more, *choices)
                good &= report(label, differences(cpu, gpu), forced)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
