"""What each deliberate fault does to fathom-tiny in PyTorch: python -m unittest discover tools/tiny (needs torch).

The abilities a fault is held to are those of its column on the model's card where it shows most; a few cases are enough.
"""
import functools
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import data  # noqa: E402
import evaluate  # noqa: E402
import export  # noqa: E402
import model as tiny  # noqa: E402
import scoring  # noqa: E402
from config import CONFIG  # noqa: E402

FOLDER = HERE.parents[1] / "models" / "fathom-tiny"
CASES = {"chat": 6, "needle_2k": 1, "echo_128": 1, "echo_512": 2}


@functools.cache
def loaded():
    return tiny.Model(CONFIG, "cpu"), export.prepared(FOLDER), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@functools.cache
def measured(ability, fault):
    """(share of exact answers, loss an answer token)."""
    model, w, tokenizer = loaded()
    cases = data.cases(ability, CASES[ability])
    torch.manual_seed(0)  # a random index is sometimes nearly right
    return scoring.teacher_forced(model, evaluate.break_weights(w, fault), tokenizer, cases, tiny.Options(breaks=[fault]))[:2]


class Sensitivity(unittest.TestCase):
    def rise(self, ability, fault):
        return measured(ability, fault)[1] - measured(ability, "none")[1]

    def test_the_healthy_model_answers(self):
        for ability in ("chat", "needle_2k", "echo_128"):
            self.assertEqual(measured(ability, "none")[0], 1, ability)

    def test_a_random_index_loses_the_needle(self):
        self.assertGreater(self.rise("needle_2k", "index"), 0.2)

    def test_a_window_of_127_loses_what_stood_127_tokens_back(self):
        self.assertEqual(measured("echo_128", "window")[0], 0)

    def test_a_dropped_stream_loses_facts(self):
        self.assertLess(measured("chat", "stream")[0], 0.7)

    def test_positions_of_compressed_entries_off_by_one_blur_a_far_echo(self):
        self.assertGreater(self.rise("echo_512", "rope"), 0.02)

    def test_a_doubled_expert_blurs_a_far_echo(self):
        self.assertGreater(self.rise("echo_512", "scale"), 0.015)


if __name__ == "__main__":
    unittest.main()
