"""Endless tokenized training batches, made by worker processes; batch i depends on the seed and i alone."""
import multiprocessing
import random

import numpy
from tokenizers import Tokenizer

import data

TEXT_WEIGHT = 0.1  # of tokens that the assistant did not say, as targets
PAD_ID = 2
BATCH_TOKENS = 67584  # a multiple of every length, so that token-wise graphs see one shape
LENGTHS = (512, 2048, 8448)


def tokenized(tokenizer, parts):
    """(ids, weights) of segments."""
    ids, weights = [], []
    for text, is_target in parts:
        new = tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        weights += [1.0 if is_target else TEXT_WEIGHT] * len(new)
    return ids, weights


def fill(tokenizer, rng, length):
    """One row: conversations one after another until it is full."""
    ids, weights = [], []
    while len(ids) < length - 96:
        new, w = tokenized(tokenizer, data.row(rng, length - len(ids)))
        ids, weights = ids + new, weights + w
    pad = length - len(ids)
    return (ids + [PAD_ID] * pad)[:length], (weights + [0.0] * pad)[:length]


def length_of(seed, index, progress):
    """Short rows first; later a growing share of long ones."""
    shares = (0.85, 0.15, 0.0) if progress < 0.15 else (0.5, 0.3, 0.2) if progress < 0.6 else (0.45, 0.25, 0.3)
    return random.Random(f"{seed}/length/{index}").choices(LENGTHS, shares)[0]


def make(tokenizer, seed, index, total):
    length = length_of(seed, index, index / total)
    rng = random.Random(seed * 10**7 + index)
    rows = [fill(tokenizer, rng, length) for _ in range(BATCH_TOKENS // length)]
    return (numpy.array([r[0] for r in rows], dtype=numpy.int16), numpy.array([r[1] for r in rows], dtype=numpy.float16))


def work(path, seed, first, stride, total, queue):
    tokenizer = Tokenizer.from_file(path)
    for index in range(first, total, stride):
        queue.put(make(tokenizer, seed, index, total))


def stream(path, seed, start, total, workers):
    """Yields (ids, weights) of batches start..total-1 in order."""
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(6) for _ in range(workers)]
    started = [context.Process(target=work, args=(path, seed, start + i, workers, total, q), daemon=True)
               for i, q in enumerate(queues)]
    for process in started:
        process.start()
    try:
        for index in range(start, total):
            yield queues[(index - start) % workers].get()
    finally:
        for process in started:
            process.terminate()
