"""Holds numerics.py (fp32) against transformers on random configs; needs no Fathom binary.

Per config and length: the free runs, then transformers forced to numerics.py's choices. Fails if
the forced logits differ by more than 1e-4 of their standard deviation, if a flipped choice had a
score gap above rounding, or if more than 0.5% of the tokens flip.

    python check_numerics.py [--configs 8]
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch

from checkpoint import Checkpoint
from make_checkpoint import make_checkpoint, random_config
from numerics import Numerics
from numerics_model import Choices, Model
from transformers_oracle import TransformersOracle

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 640, 1500)
LOGIT_LIMIT, GAP_LIMIT, FLIP_SHARE = 1e-4, 1e-5, 0.005


def used(choices: Choices) -> tuple[dict, dict]:
    """The selections in the form that forward() takes to force them."""
    return ({k: c.used for k, c in choices.routing.items()},
            {k: c.used for k, c in choices.index.items()})


def flips(choices: Choices, tokens: int) -> tuple[int, float]:
    """Tokens where any layer's free choice differs, and the largest score gap among them."""
    flipped, gap = torch.zeros(tokens, dtype=torch.bool), 0.0
    for choice in [*choices.routing.values(), *choices.index.values()]:
        flipped |= choice.flipped
        if choice.flipped.any():
            gap = max(gap, float(choice.gap[choice.flipped].max()))
    return int(flipped.sum()), gap


def describe(config: dict) -> str:
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    return (f"ratios={ratios} hash={config['num_hash_layers']} H={config['hidden_size']} "
            f"A={config['num_attention_heads']} G={config['o_groups']}x{config['o_lora_rank']} "
            f"L={config['q_lora_rank']} E={config['num_experts_per_tok']}/"
            f"{config['n_routed_experts']}x{config['moe_intermediate_size']} "
            f"index={config['index_n_heads']}top{config['index_topk']} "
            f"{config['expert_dtype']}")


def check(seed: int) -> bool:
    config = random_config(seed, "fp8" if seed % 3 == 2 else "fp4", draft="none")
    print(f"config {seed}: {describe(config)}")
    good, flipped = True, 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(make_checkpoint(config, seed, folder, shards=1 + seed % 3))
        model, oracle = Model(checkpoint, Numerics("fp32")), TransformersOracle(checkpoint)
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(seed * 10000 + length)
            tokens = torch.randint(0, config["vocab_size"], (length,), generator=generator)
            logits, choices = model.forward(tokens)
            other, other_choices = oracle.forward(tokens, *used(choices))
            difference = float((logits - other).abs().max() / other.std())
            count, gap = flips(other_choices, length)
            fine = difference <= LOGIT_LIMIT and gap <= GAP_LIMIT
            good, flipped = good and fine, flipped + count
            print(f"  length {length:5d}  logits {difference:.1e} of std  flipped {count:3d}"
                  f"  gap {gap:.1e}  {'ok' if fine else 'FAILED'}")
    few = flipped <= max(1, FLIP_SHARE * sum(LENGTHS))
    print(f"  {flipped} of {sum(LENGTHS)} tokens flipped  {'ok' if few else 'FAILED'}")
    return good and few


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(2)
    seeds = range(args.first_seed, args.first_seed + args.configs)
    results = [check(seed) for seed in seeds]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
