"""Writes random tiny checkpoints in the official format, for comparisons.

Initialised so that activations stay of order one through all layers and routing is close to
uniform; every learned vector (norms, biases, sinks, position biases) is random, so that a kernel
that ignores one is caught. Every element follows from the tensor's name and the seed by integer
arithmetic (`Recipe`), so that a test in another language can make the same file.

    python make_checkpoint.py --seed 3 --out /tmp/ckpt [--experts fp8] [--draft mtp|dspark]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HEAD_DIM, ROPE_DIM, WINDOW, INDEX_DIM, STREAMS = 512, 64, 128, 128, 4


def base_config() -> dict:
    """The fields of a published config.json that never vary here."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "sliding_window": WINDOW,
        "index_head_dim": INDEX_DIM,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 1048576,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }


def random_config(seed: int, expert_dtype: str = "fp4", draft: str = "mtp") -> dict:
    """A small random architecture; the first seeds cover every layer kind."""
    rng = random.Random(seed)
    layers = rng.randint(2, 4)
    ratios = [rng.choice([0, 4, 128]) for _ in range(layers)]
    ratios[rng.randrange(layers)] = 4
    heads, groups = rng.choice([(2, 1), (2, 2), (4, 2), (4, 4), (6, 2), (8, 4)])
    experts = rng.choice([4, 6, 8, 12])
    # o_groups * o_lora_rank has to be a multiple of 128.
    rank = rng.choice([128, 256]) // groups if 128 % groups == 0 else 128
    config = base_config() | {
        "num_hidden_layers": layers,
        "hidden_size": rng.choice([128, 256, 384]),
        "num_attention_heads": heads,
        "q_lora_rank": rng.choice([128, 256]),
        "o_groups": groups,
        "o_lora_rank": rank,
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(4, experts - 1)),
        "moe_intermediate_size": rng.choice([128, 256]),
        "num_hash_layers": rng.randint(0, layers - 1),
        "routed_scaling_factor": rng.choice([1.5, 2.5]),
        "index_n_heads": rng.choice([8, 16, 32]),
        "index_topk": rng.choice([8, 16, 40]),
        "vocab_size": rng.choice([129, 256, 300]),
        "compress_ratios": ratios,
        "expert_dtype": expert_dtype,
    }
    return with_draft(config, draft)


def with_draft(config: dict, draft: str) -> dict:
    layers = config["num_hidden_layers"]
    config = dict(config)
    config["compress_ratios"] = config["compress_ratios"][:layers]
    if draft == "mtp":
        config["num_nextn_predict_layers"] = 1
        config["compress_ratios"] = config["compress_ratios"] + [0]
    elif draft == "dspark":
        targets = sorted({0, layers // 2, layers - 1})
        config["num_nextn_predict_layers"] = 1
        config["compress_ratios"] = config["compress_ratios"] + [0] * 3
        config["dspark_block_size"] = 5
        config["dspark_markov_rank"] = 32
        config["dspark_target_layer_ids"] = targets
        config["dspark_noise_token_id"] = config["vocab_size"] - 1
    elif draft == "none":
        config["num_nextn_predict_layers"] = 0
    else:
        raise ValueError(f"draft is {draft!r}, expected mtp, dspark or none")
    return config


GOLDEN_RATIO = 0x9E3779B97F4A7C15
FP8_CODES = (24, 56)  # first magnitude code and how many: 2^-4 to 7.5
FP8_RMS, FP4_RMS = 2.39, 2.93  # of the random codes
SCALE_SPREAD_RMS = 2.65  # of a scale that is 1, 2 or 4


def random_words(seed: int, count: int) -> np.ndarray:
    """Words 0..count-1 of the splitmix64 sequence of `seed`."""
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64)
        z = np.uint64(seed) + steps * np.uint64(GOLDEN_RATIO)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def name_hash(name: str) -> int:
    """FNV-1a, 64 bits."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


@dataclass(frozen=True)
class Recipe:
    """How to make one tensor; short enough to store where the tensor itself is too large.

    Element i (row-major) comes from word u_i of splitmix64 seeded with FNV-1a(name) xor the seed:
      BF16, F32  center + 2^spread * (2 * (u >> 48) - 65535) / 65536, exact in FP32, then rounded
      F8_E4M3    sign u >> 63; magnitude code 24 + (u >> 32 & 0xffff) % 56
      F8_E8M0    byte center + (u >> 32) % 3
      I8         byte u >> 56
      I64        [t, j]: ((u_t >> 32) % center + j) % center, so that a row has no duplicates
    """

    dtype: str
    shape: tuple[int, ...]
    center: float = 0
    spread: int = 0

    def tensor(self, name: str, seed: int) -> torch.Tensor:
        rows = self.shape[0] if self.dtype == "I64" else math.prod(self.shape)
        words = random_words(name_hash(name) ^ seed, rows)
        high = (words >> np.uint64(32)).astype(np.int64)
        if self.dtype in ("BF16", "F32"):
            k = (words >> np.uint64(48)).astype(np.float64)
            value = self.center + 2.0**self.spread * (2 * k - 65535) / 65536
            flat = torch.from_numpy(value.astype(np.float32))
            flat = flat.to(torch.bfloat16) if self.dtype == "BF16" else flat
        elif self.dtype == "F8_E4M3":
            code = FP8_CODES[0] + (high & 0xFFFF) % FP8_CODES[1]
            code |= (words >> np.uint64(63)).astype(np.int64) << 7
            flat = torch.from_numpy(code.astype(np.uint8)).view(torch.float8_e4m3fn)
        elif self.dtype == "F8_E8M0":
            flat = torch.from_numpy((int(self.center) + high % 3).astype(np.uint8))
            flat = flat.view(torch.float8_e8m0fnu)
        elif self.dtype == "I8":
            flat = torch.from_numpy((words >> np.uint64(56)).astype(np.uint8)).view(torch.int8)
        else:
            count = int(self.center)
            flat = torch.from_numpy((high[:, None] % count + np.arange(self.shape[1])) % count)
        return flat.reshape(self.shape)


def log2_nearest(x: float) -> int:
    return round(math.log2(x))


class Recipes:
    """The recipes of all tensors of a config, by name, in the order of writing."""

    def __init__(self, config: dict):
        self.config = config
        self.all: dict[str, Recipe] = {}

    def vector(self, name: str, *shape: int, dtype: str = "F32", center=0.0, spread=-1) -> None:
        self.all[name] = Recipe(dtype, shape, center, spread)

    def norm(self, name: str, width: int) -> None:
        self.vector(name + ".weight", width, dtype="BF16", center=1.0, spread=-2)

    def matrix(self, name: str, rows: int, cols: int, dtype: str = "BF16", gain: float = 1) -> None:
        """A product with inputs of size one gives outputs of about the size `gain`."""
        self.vector(name, rows, cols, dtype=dtype,
                    spread=log2_nearest(gain * math.sqrt(3 / cols)))

    def quantized(self, name: str, kind: str, rows: int, cols: int, gain: float = 1) -> None:
        fp8 = kind == "fp8"
        self.all[name + ".weight"] = (
            Recipe("F8_E4M3", (rows, cols)) if fp8 else Recipe("I8", (rows, cols // 2)))
        size = (FP8_RMS if fp8 else FP4_RMS) * SCALE_SPREAD_RMS
        shape = (-(-rows // 128), -(-cols // 128)) if fp8 else (rows, cols // 32)
        self.all[name + ".scale"] = Recipe(
            "F8_E8M0", shape, 127 + log2_nearest(gain * cols**-0.5 / size))

    def fp8(self, name: str, rows: int, cols: int, gain: float = 1) -> None:
        self.quantized(name, "fp8", rows, cols, gain)

    def expert(self, name: str, rows: int, cols: int, gain: float) -> None:
        self.quantized(name, self.config.get("expert_dtype", "fp4"), rows, cols, gain)

    def hyper_connection(self, name: str) -> None:
        flat = STREAMS * self.config["hidden_size"]
        self.matrix(name + "_fn", 24, flat, dtype="F32")
        self.vector(name + "_base", 24, spread=0)
        self.vector(name + "_scale", 3, center=0.5, spread=-3)

    def head_mix(self, prefix: str) -> None:
        flat = STREAMS * self.config["hidden_size"]
        self.matrix(prefix + "hc_head_fn", STREAMS, flat, dtype="F32")
        self.vector(prefix + "hc_head_base", STREAMS, spread=0)
        self.vector(prefix + "hc_head_scale", 1, center=0.5, spread=-3)

    def compressor(self, name: str, width: int, ratio: int) -> None:
        hidden, columns = self.config["hidden_size"], width * (2 if ratio == 4 else 1)
        self.vector(name + ".ape", ratio, columns, spread=0)
        self.matrix(name + ".wkv.weight", columns, hidden)
        self.matrix(name + ".wgate.weight", columns, hidden)
        self.norm(name + ".norm", width)

    def attention(self, name: str, ratio: int) -> None:
        c = self.config
        hidden, rank = c["hidden_size"], c["q_lora_rank"]
        heads, groups, out_rank = c["num_attention_heads"], c["o_groups"], c["o_lora_rank"]
        self.fp8(name + ".wq_a", rank, hidden)
        self.norm(name + ".q_norm", rank)
        self.fp8(name + ".wq_b", heads * HEAD_DIM, rank)
        self.fp8(name + ".wkv", HEAD_DIM, hidden)
        self.norm(name + ".kv_norm", HEAD_DIM)
        self.fp8(name + ".wo_a", groups * out_rank, heads // groups * HEAD_DIM, gain=2.0)
        self.fp8(name + ".wo_b", hidden, groups * out_rank)
        self.vector(name + ".attn_sink", heads, spread=1)
        if ratio:
            self.compressor(name + ".compressor", HEAD_DIM, ratio)
        if ratio == 4:
            self.fp8(name + ".indexer.wq_b", c["index_n_heads"] * INDEX_DIM, rank)
            self.matrix(name + ".indexer.weights_proj.weight", c["index_n_heads"], hidden)
            self.compressor(name + ".indexer.compressor", INDEX_DIM, 4)

    def experts(self, name: str, hashed: bool) -> None:
        c = self.config
        hidden, inter, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        self.matrix(name + ".gate.weight", count, hidden)
        if hashed:
            self.all[name + ".gate.tid2eid"] = Recipe(
                "I64", (c["vocab_size"], c["num_experts_per_tok"]), count)
        else:
            self.vector(name + ".gate.bias", count, spread=-3)
        for e in range(count):
            self.expert(f"{name}.experts.{e}.w1", inter, hidden, 1.0)
            self.expert(f"{name}.experts.{e}.w3", inter, hidden, 1.0)
            self.expert(f"{name}.experts.{e}.w2", hidden, inter, 2.0)
        self.fp8(name + ".shared_experts.w1", inter, hidden)
        self.fp8(name + ".shared_experts.w3", inter, hidden)
        self.fp8(name + ".shared_experts.w2", hidden, inter, gain=2.0)

    def block(self, name: str, ratio: int, hashed: bool) -> None:
        self.hyper_connection(name + ".hc_attn")
        self.hyper_connection(name + ".hc_ffn")
        self.norm(name + ".attn_norm", self.config["hidden_size"])
        self.norm(name + ".ffn_norm", self.config["hidden_size"])
        self.attention(name + ".attn", ratio)
        self.experts(name + ".ffn", hashed)

    def mtp(self) -> None:
        hidden = self.config["hidden_size"]
        self.block("mtp.0", 0, False)
        self.fp8("mtp.0.e_proj", hidden, hidden)
        self.fp8("mtp.0.h_proj", hidden, hidden)
        for norm in ("enorm", "hnorm", "norm"):
            self.norm(f"mtp.0.{norm}", hidden)
        self.head_mix("mtp.0.")

    def dspark(self, stages: int) -> None:
        c = self.config
        hidden, rank, vocab = c["hidden_size"], c["dspark_markov_rank"], c["vocab_size"]
        for stage in range(stages):
            self.block(f"mtp.{stage}", 0, False)
        self.fp8("mtp.0.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
        self.norm("mtp.0.main_norm", hidden)
        last = f"mtp.{stages - 1}."
        self.norm(last + "norm", hidden)
        self.head_mix(last)
        self.vector(last + "markov_head.markov_w1.weight", vocab, rank, dtype="BF16", spread=1)
        self.matrix(last + "markov_head.markov_w2.weight", vocab, rank)
        self.matrix(last + "confidence_head.proj.weight", 1, hidden + rank, "F32", gain=0.1)

    def model(self) -> dict[str, Recipe]:
        c = self.config
        hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
        self.vector("embed.weight", vocab, hidden, dtype="BF16", spread=1)
        for n in range(layers):
            self.block(f"layers.{n}", c["compress_ratios"][n], n < c["num_hash_layers"])
        self.head_mix("")
        self.norm("norm", hidden)
        self.matrix("head.weight", vocab, hidden)
        stages = len(c["compress_ratios"]) - layers
        if "dspark_block_size" in c:
            self.dspark(stages)
        elif stages:
            self.mtp()
        return self.all


def make_checkpoint(config: dict, seed: int, folder: str | Path, shards: int = 1) -> Path:
    """Writes config.json and the tensors; `shards` > 1 also writes the index file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    recipes = Recipes(config).model()
    tensors = {name: recipe.tensor(name, seed) for name, recipe in recipes.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--experts", choices=["fp4", "fp8"], default="fp4")
    parser.add_argument("--draft", choices=["mtp", "dspark", "none"], default="mtp")
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    config = random_config(args.seed, args.experts, args.draft)
    print(make_checkpoint(config, args.seed, args.out, args.shards))


if __name__ == "__main__":
    main()
