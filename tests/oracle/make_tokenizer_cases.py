#!/usr/bin/env python3
"""Writes src/text/testdata/tokenizer_cases.json: texts, their pieces and their ids by the `tokenizers` library.

    pip install tokenizers
    python3 tests/oracle/make_tokenizer_cases.py

The pieces are those of V4's pre-tokenizer, the ids those of models/fathom-tiny. Run it again when that
vocabulary changes.
"""

import json
import pathlib
import random

from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEXTS = [
    "", "Hello, world.", "12345 67", "1234567", "  12", "a  b", "a   ", "   a", " \n \n  x", "\r\n\r\nx", "a\r\n",
    "\t\tif (x):\n\t\t\treturn", "don't won't I'll", "foo.bar(baz)->qux", "...!!!\n\n", " !!\r\n", " $5", "'a", "' a",
    "é'été", "naïve café", "e\u0301a", " \u0301", "\u0301\u0301", "中文字符", "日本語のカタカナ", "中1文", "a中b", "  中", " 中 ",
    "\u3040\u30ff", "㐀一龥龦", "、。「」", "한국어 문장", "שלום עולם", "हिन्दी में", "ไทยแลนด์", "٠١٢٣٤ ١", "½²Ⅳ①", "𝟘𝟙𝟚𝟛",
    "👩‍👩‍👧", "🏳️‍🌈 🇩🇪", "❤️", "\u200d\u200da", "\u200b\u200b b", "x\u200by", "\ufeffstart", "\u00a0x", "a\u00a0\u00a0b",
    "\u2028x\u2029", "\x85x", "\v\f", "a\u3000b", "\x00\x01a", "\U000e0001\U000e0020", "\ue000\ue001 ", "\U0010ffff1",
    "𠀀𠀁 a", "ＡＢＣ１２３！", "ǅ ǈ", "_x__y_", "~/a/b?c=d&e=f#g", "a\u0600b", "\u061c\u200f", "ª º µ", "\u16ee\u3007",
    "<｜User｜>hi<｜Assistant｜><think>", "<<think>>", "｜DSML｜", "<｜DSML｜tool_calls>", "</think>\n\n<｜DSML｜invoke name=\"f\">",
    "<｜User", "<｜User｜", "<thin<think>k>", "<think><think></think>",
]  # fmt: skip
ALPHABET = list("ab1 2.,'$ \n\r\t<é中あア\u0301\u200d\u00a0½。€👩") + ["  ", "\r\n", "12", "ab", "<think>", "  \n"]


def main():
    tokenizer = Tokenizer.from_file(str(ROOT / "models/fathom-tiny/tokenizer.json"))
    rng = random.Random(5)
    texts = TEXTS + ["".join(rng.choices(ALPHABET, k=rng.randrange(2, 14))) for _ in range(300)]
    texts += [unit * n for unit in ["a", " ", "中", "!"] for n in (47, 48, 49, 130)]
    cases = []
    for text in texts:
        pieces = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "pieces": pieces, "ids": ids})
    path = ROOT / "src/text/testdata/tokenizer_cases.json"
    lines = ",\n".join(json.dumps(case, ensure_ascii=True, separators=(",", ":")) for case in cases)
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
