"""Writes the whole-model cases of tests/golden/model: recipes instead of weights, expected logits.

A checkpoint of this architecture is megabytes even when tiny. NAME.json therefore holds the config,
NAME.tensors the recipe of every tensor (make_checkpoint.Recipe says how to follow one),
NAME.safetensors the tokens and what numerics.py makes of them. The tokens are chosen so that no
choice is close in fp32; official logits are those of canonical sums, to the last bit.

    python make_golden.py [--out ../golden/model]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from checkpoint import Checkpoint
from make_checkpoint import Recipes, base_config, make_checkpoint, name_hash, with_draft
from numerics import Numerics
from numerics_drafts import DSpark, Mtp
from numerics_model import Model

# name: layers, hashed layers, heads, groups, topk experts, experts, index topk, expert dtype, draft
CASES = {
    "window": ([0], 0, 2, 1, 2, 4, 8, "fp4", "none", 150),
    "hashed": ([0, 0], 2, 2, 2, 3, 6, 8, "fp8", "none", 40),
    "sparse": ([4], 0, 2, 2, 1, 3, 8, "fp4", "none", 141),
    "heavy": ([128], 1, 4, 2, 2, 4, 8, "fp4", "none", 259),
    "mixed": ([128, 4, 0], 1, 4, 4, 2, 5, 16, "fp8", "mtp", 270),
    "mtp": ([0, 4], 1, 2, 1, 2, 4, 8, "fp4", "mtp", 137),
    "dspark": ([4, 128], 1, 2, 2, 2, 4, 8, "fp4", "dspark", 133),
}
VOCAB, SMALLEST_GAP = 64, 1e-4


def case_config(layers, hashed, heads, groups, topk, experts, index_topk, dtype, draft) -> dict:
    return with_draft(base_config() | {
        "num_hidden_layers": len(layers), "compress_ratios": layers, "num_hash_layers": hashed,
        "hidden_size": 128, "num_attention_heads": heads, "q_lora_rank": 128,
        "o_groups": groups, "o_lora_rank": 128 // groups, "n_routed_experts": experts,
        "num_experts_per_tok": topk, "moe_intermediate_size": 128, "routed_scaling_factor": 1.5,
        "index_n_heads": 16, "index_topk": index_topk, "vocab_size": VOCAB, "expert_dtype": dtype,
    }, draft)


def kept_positions(length: int) -> torch.Tensor:
    """Where logits are stored: the edges of every boundary, and the end."""
    edges = (0, 1, 2, 3, 4, 7, 8, 126, 127, 128, 129, 131, 132, 255, 256, 257)
    return torch.tensor(sorted({p for p in edges if p < length} | {length - 2, length - 1}))


def clear_tokens(model: Model, length: int, seed: int):
    """Tokens on which no fp32 choice is closer than SMALLEST_GAP, and their run."""
    for attempt in range(200):
        generator = torch.Generator().manual_seed(seed * 1000 + attempt)
        tokens = torch.randint(0, VOCAB, (length,), generator=generator)
        after, choices = model.forward_streams(tokens)
        gaps = [c.gap.min() for c in [*choices.routing.values(), *choices.index.values()]]
        if not gaps or float(min(gaps)) >= SMALLEST_GAP:
            return tokens, after
    raise RuntimeError("no token sequence without a close choice; change the seed")


def draft_outputs(model: Model, tokens, after) -> dict[str, torch.Tensor]:
    if "dspark_block_size" in model.config:
        dspark = DSpark(model)
        dspark.extend([streams[:-1] for streams in after])
        ids, logits, confidence = dspark.draft(int(tokens[-1]))
        return {"fp32.dspark.ids": torch.tensor(ids, dtype=torch.int32),
                "fp32.dspark.logits": logits, "fp32.dspark.confidence": confidence}
    if "mtp.0.e_proj.weight" in model.checkpoint:
        logits, _ = Mtp(model).extend(after[-1][:-1], tokens[1:])
        return {"fp32.mtp.logits": logits[kept_positions(len(tokens) - 1)]}
    return {}


def official_outputs(checkpoint: Checkpoint, tokens, kept) -> dict[str, torch.Tensor]:
    model = Model(checkpoint, Numerics("official", order="canonical"))
    return {"official.logits": model.forward(tokens)[0][kept]}


def write_case(name: str, number: int, out: Path) -> None:
    *shape, length = CASES[name]
    config, seed = case_config(*shape), 40 + number
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(make_checkpoint(config, seed, folder))
        model = Model(checkpoint, Numerics("fp32"))
        tokens, after = clear_tokens(model, length, seed)
        kept = kept_positions(length)
        expected = {
            "tokens": tokens.to(torch.int32), "positions": kept.to(torch.int32),
            "fp32.logits": model.logits(model.collapse(after[-1]))[kept],
        } | draft_outputs(model, tokens, after) | official_outputs(checkpoint, tokens, kept)
    lines = [f"{tensor} {r.dtype} {'x'.join(map(str, r.shape))} {r.center} {r.spread} "
             f"{name_hash(tensor) ^ seed:016x}\n" for tensor, r in Recipes(config).model().items()]
    (out / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / f"{name}.tensors").write_text("".join(lines))
    path = out / f"{name}.safetensors"
    save_file({k: v.contiguous() for k, v in expected.items()}, path)
    path.chmod(0o644)
    print(f"{name:8s} {length:4d} tokens, {len(lines)} tensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path,
                        default=Path(__file__).parent.parent / "golden" / "model")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for number, name in enumerate(CASES):
        write_case(name, number, args.out)


if __name__ == "__main__":
    main()
