"""Trains fathom-tiny's tokenizer.json: byte-level BPE with DeepSeek-V4's pre-tokenizer and V4's special tokens.

    python train_tokenizer.py OUT_FOLDER

The text is the generated training data plus, so that other English falls into fewer pieces, the docstrings of Python's
standard library (PSF licence; only merge statistics are taken). No merge joins digits, so that a sum is seen digit by
digit; the pre-tokenizer itself is V4's, three sequential splits.
"""
import argparse
import ast
import json
import pathlib
import random
import sysconfig

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers, decoders

import data
import encoding

VOCAB_SIZE = 3072
HEAD = [encoding.BOS, encoding.EOS, encoding.PAD]  # ids 0, 1, 2 as in V4
TAIL = ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", encoding.USER, encoding.ASSISTANT, "<|EOT|>", encoding.THINK,
        encoding.END_THINK, encoding.DSML, "<｜begin▁sys｜>", "<｜end▁sys｜>", encoding.REMINDER, "<｜action｜>", "<｜query｜>",
        "<｜authority｜>", "<｜domain｜>", "<｜task｜>", "<｜title｜>", "<｜answer｜>", "<｜search｜>", "<｜search▁begin｜>",
        "<｜search▁end｜>", "<｜extracted_url｜>", "<｜read_url｜>", "<｜end_of_query｜>"]
DIGITS = r"\p{N}{1,3}"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
WORDS = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
         " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")


def splits(digits):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r), "isolated") for r in (digits, CJK, WORDS)]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def generated(rows):
    for i in range(rows):
        yield "".join(text for text, _ in data.row(random.Random(i), 600))


def docstrings(limit):
    """Docstrings of the standard library's top-level modules, in file order."""
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:limit]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def corpus():
    specials = HEAD + TAIL
    for text in [*generated(3000), *docstrings(150)]:
        for token in specials:
            text = text.replace(token, "\n")
        yield text


def train(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splits(r"\p{N}")
    base = VOCAB_SIZE - len(TAIL)
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=base, special_tokens=HEAD, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    tokenizer.pre_tokenizer = splits(DIGITS)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    out = json.loads(tokenizer.to_str())
    assert len(out["model"]["vocab"]) == base
    ids = list(enumerate(HEAD)) + [(base + i, t) for i, t in enumerate(TAIL)]
    out["added_tokens"] = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
                            "normalized": False, "special": t in HEAD} for i, t in ids]
    path = pathlib.Path(folder) / "tokenizer.json"
    path.write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return Tokenizer.from_file(str(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    tokenizer = train(parser.parse_args().folder)
    text = "".join("".join(t for t, _ in data.row(random.Random(10**6 + i), 600)) for i in range(200))
    size = len(tokenizer.encode(text, add_special_tokens=False).ids)
    print(f"vocabulary {tokenizer.get_vocab_size()}, {len(text) / size:.2f} characters a token")


if __name__ == "__main__":
    main()
