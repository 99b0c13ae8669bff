#!/usr/bin/env python3
"""`fathom score` on a GPU against the CPU, which is the reference.

    python3 tests/oracle/compare_devices.py --binary build-cuda/fathom --model models/fathom-tiny

For every token: the log-probability of the CPU's likeliest next token, on both. The CPU's results do
not depend on chunks or batch. The GPU is run whole, in chunks, and with several sequences at once:

replay  every layer on the CPU's streams and choices. The logits are then the head's work alone; the
        streams after each layer are that layer's: of a token, the root of the mean square difference
        over that of the streams.
forced  with the CPU's choices, end to end.
free    with its own.

Two correct implementations take sums in another order; that moves some results by a unit of BF16, some
of those an FP8 code, and now and then a choice (docs/numerics.md, "What another order of sums does").
At real widths the noise fills a layer's FP8 activations within that layer, whatever its first cause. So
the limits hold where they can, and the difference of the GPU to itself, run in other chunks, says what
noise is: a rounding point that is missed or a wrong entry puts the CPU farther from the GPU than the
GPU is from itself. Judged is the 90th percentile (in a small model the GPU takes some sums in the same
order whatever the chunk, so its median is of tokens that no flip reached); allowed is twice the noise.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HEAD_LIMIT = 0.03  # replay: the largest difference
STREAMS_LIMIT = 2 ** -9  # half a unit of BF16
FORCED_LIMIT, FREE_LIMIT = 0.03, 0.05
NOISE_FACTOR = 2
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 63, 65, 127, 128, 129, 131, 255, 256, 257, 300)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", bytes(data[:8]))
    tensors = {}
    for name, info in json.loads(bytes(data[8:8 + length])).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        raw = data[begin:end]
        if info["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view({"F32": np.float32, "I32": np.int32}[info["dtype"]])
        tensors[name] = values.reshape(info["shape"])
    return tensors


def score(args, folder: Path, name: str, *more: str) -> list[np.ndarray]:
    logits = folder / f"{name}.safetensors"
    command = [args.binary, "score", args.model, "--input", str(folder / "in.jsonl"),
               "--logits", str(logits), *more]
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr.strip()}")
    print(f"  {name}: {time.time() - begin:.1f} s", flush=True)
    tensors = read_tensors(logits)
    return [tensors[f"logits.{i}"] for i in range(len(tensors))]


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


def stream_differences(cpu: Path, gpu: Path) -> dict[int, np.ndarray]:
    """By layer: of each token, the relative root mean square difference of its streams."""
    ours, theirs = read_tensors(gpu), read_tensors(cpu)
    out: dict[int, list[np.ndarray]] = {}
    for name, a in theirs.items():
        if name.startswith("streams."):
            b = ours[name]
            square = ((a - b).astype(np.float64) ** 2).sum((1, 2)) / (a.astype(np.float64) ** 2).sum((1, 2))
            out.setdefault(int(name.split(".")[2]), []).append(np.sqrt(square))
    return {layer: np.concatenate(parts) for layer, parts in sorted(out.items())}


def report(label: str, kind: str, d: np.ndarray, noise: np.ndarray) -> bool:
    def within(limit: float) -> float:
        return 100 * float((d <= limit).mean())
    limit = {"replay": HEAD_LIMIT, "forced": FORCED_LIMIT, "free": FREE_LIMIT}[kind]
    value = d.max() if kind == "replay" else np.quantile(d, 0.9)
    fine = value <= max(limit, NOISE_FACTOR * np.quantile(noise, 0.9))
    print(f"  {label:26s} {kind:6s} median {np.median(d):.5f} (noise {np.median(noise):.5f})  p90 "
          f"{np.quantile(d, .9):.5f} ({np.quantile(noise, .9):.5f})  p99 {np.quantile(d, .99):.5f} "
          f"({np.quantile(noise, .99):.5f})  within 0.03 {within(.03):.1f}%, 0.05 {within(.05):.1f}%  "
          f"{'ok' if fine else 'OVER'}", flush=True)
    return bool(fine)


def report_streams(label: str, by_layer: dict[int, np.ndarray], noise: dict[int, np.ndarray]) -> bool:
    good = True
    for layer, d in by_layer.items():
        other = noise[layer]
        fine = np.quantile(d, .9) <= max(STREAMS_LIMIT, NOISE_FACTOR * np.quantile(other, .9))
        good &= bool(fine)
        print(f"  {label:26s} replay layer {layer}: streams median {np.median(d):.1e} "
              f"({np.median(other):.1e})  p90 {np.quantile(d, .9):.1e} ({np.quantile(other, .9):.1e})  "
              f"p99 {np.quantile(d, .99):.1e} ({np.quantile(other, .99):.1e})  "
              f"{'ok' if fine else 'OVER'}", flush=True)
    return good


@dataclass
class Run:
    label: str
    logits: dict[str, list[np.ndarray]]  # by kind
    trace: Path


def run_gpu(args, folder: Path, trace: Path, chunk: str, batch: str) -> Run:
    more = ["--device", "cuda", "--batch", batch, *([] if chunk == "0" else ["--chunk", chunk])]
    own = folder / f"trace.{chunk}.{batch}.safetensors"
    kinds = {"replay": ["--replay", str(trace), "--trace", str(own)],
             "forced": ["--choices", str(trace)], "free": []}
    logits = {kind: score(args, folder, f"gpu.{chunk}.{batch}.{kind}", *more, *options)
              for kind, options in kinds.items()}
    return Run(f"chunk {chunk if chunk != '0' else 'whole'}, batch {batch}", logits, own)


def compare(cpu: list[np.ndarray], trace: Path, runs: list[Run]) -> bool:
    good = True
    for i, run in enumerate(runs):
        other = runs[0 if i > 0 else 1]
        for kind, logits in run.logits.items():
            good &= report(run.label, kind, differences(cpu, logits),
                           differences(other.logits[kind], logits))
        good &= report_streams(run.label, stream_differences(trace, run.trace),
                               stream_differences(other.trace, run.trace))
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")],
                        default=list(LENGTHS))
    parser.add_argument("--input", help="JSON lines of tokens instead of random ones")
    parser.add_argument("--runs", default="0/1,64/1,7/4,1/64",
                        help="chunk/batch of each run on the GPU, two at least; chunk 0: whole")
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
        runs = [run_gpu(args, folder, trace, *run.split("/")) for run in args.runs.split(",")]
        good = compare(cpu, trace, runs)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
