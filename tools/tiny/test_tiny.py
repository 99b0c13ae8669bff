"""Tests of fathom-tiny's tools: python -m unittest discover tools/tiny (needs requirements.txt; seconds)."""
import json
import pathlib
import random
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import batches  # noqa: E402
import data  # noqa: E402
import encoding  # noqa: E402
import export  # noqa: E402
import quant  # noqa: E402
import tasks  # noqa: E402

ROOT = HERE.parents[1]
VECTORS = ROOT / "src" / "text" / "testdata" / "encoding"


class Encoding(unittest.TestCase):
    def test_renders_the_official_vectors(self):
        for i in range(1, 5):
            given = json.loads((VECTORS / f"test_input_{i}.json").read_text(encoding="utf-8"))
            if isinstance(given, dict):
                given = encoding.with_tools(given["messages"], given["tools"])
            want = (VECTORS / f"test_output_{i}.txt").read_text(encoding="utf-8")
            self.assertEqual(encoding.render(given, thinking=i < 4), want)

    def test_segments_tokenize_as_the_whole_text_does(self):
        tokenizer = Tokenizer.from_file(str(ROOT / "models" / "fathom-tiny" / "tokenizer.json"))
        for seed in range(40):
            parts = data.row(random.Random(seed), 600)
            whole = tokenizer.encode("".join(t for t, _ in parts), add_special_tokens=False).ids
            self.assertEqual(batches.tokenized(tokenizer, parts)[0], whole)


class Quantization(unittest.TestCase):
    def test_fp4_rounds_ties_to_the_even_code(self):
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
        self.assertEqual(quant.round_fp4(ties).tolist(), [0, 1, 1, 2, 2, 4, 4, 6])

    def test_packed_fp4_reads_back(self):
        q, scale = quant.weight_fp4(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
        self.assertTrue(torch.equal(export.unpack_fp4(quant.pack_fp4(q)), q))
        self.assertTrue(torch.equal(export.from_e8m0(export.e8m0(scale)), scale))

    def test_the_least_power_of_two(self):
        x = torch.tensor([1.0, 1.5, 2.0, 0.3])
        self.assertEqual(quant.power_of_two_at_least(x).tolist(), [1, 2, 2, 0.5])


class Data(unittest.TestCase):
    def test_steps_of_a_sum_end_in_its_value(self):
        for a in range(100):
            for b in range(100):
                self.assertTrue(tasks.add_steps(a, b).endswith(f"{a + b}."))
                self.assertTrue(tasks.subtract_steps(a, b).endswith(f"{a - b}."))

    def test_training_never_sees_a_held_out_sum(self):
        rng = random.Random(0)
        asked = {tasks.sum_turn(rng).reasoning for _ in range(2000)}
        for case in data.cases("sums", 100):
            self.assertNotIn(case["expect"]["reasoning"], asked)

    def test_a_needle_stands_once_in_its_haystack(self):
        for case in data.cases("needle_2k", 10):
            self.assertEqual(case["messages"][0]["content"].count(case["expect"]["answer"]), 1)

    def test_the_same_seed_gives_the_same_case(self):
        self.assertEqual(data.cases("tools", 5), data.cases("tools", 5))


if __name__ == "__main__":
    unittest.main()
