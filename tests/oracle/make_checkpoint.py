"""Writes random tiny checkpoints in the official format, for comparisons.

Initialised so that activations stay of order one through all layers and routing is close to
uniform; every learned vector (norms, biases, sinks, position biases) is random, so that a kernel
that ignores one is caught.

    python make_checkpoint.py --seed 3 --out /tmp/ckpt [--experts fp8] [--draft mtp|dspark]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

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


def power_of_two_scale(amax: torch.Tensor, top: float) -> torch.Tensor:
    """ue8m0 bytes of the smallest power of two s with amax / s <= top."""
    exponent = torch.ceil(torch.log2(amax.double().clamp(min=2.0**-100) / top)).to(torch.int32)
    return (exponent + 127).to(torch.uint8)


class Writer:
    def __init__(self, config: dict, seed: int):
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def bf16(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = value.to(torch.bfloat16)

    def fp32(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = value.float()

    def norm(self, name: str, width: int) -> None:
        self.bf16(name + ".weight", 1 + self.normal(width, std=0.2))

    def fp8(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        value = self.normal(rows, cols, std=gain * cols**-0.5)
        # Blocks of different magnitude, so that a scale taken from the wrong block shows.
        value *= torch.exp2(self.normal(-(-rows // 128), -(-cols // 128), std=0.5)).repeat_interleave(
            128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
        padded[:rows, :cols] = value
        blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = power_of_two_scale(blocks.abs().amax((1, 3)), 448.0)
        factor = torch.exp2(scale.float() - 127)[:, None, :, None]
        quantized = (blocks / factor).reshape(padded.shape)[:rows, :cols].contiguous()
        self.tensors[name + ".weight"] = quantized.clamp(-448, 448).to(torch.float8_e4m3fn)
        self.tensors[name + ".scale"] = scale.view(torch.float8_e8m0fnu)

    def fp4(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        value = self.normal(rows, cols // 32, 32, std=gain * cols**-0.5)
        scale = power_of_two_scale(value.abs().amax(-1), 6.0)
        ratio = value / torch.exp2(scale.float() - 127)[..., None]
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        code = (ratio.abs()[..., None] - grid).abs().argmin(-1).to(torch.uint8)
        code |= (ratio < 0).to(torch.uint8) << 3
        code = code.reshape(rows, cols // 2, 2)
        self.tensors[name + ".weight"] = (code[..., 0] | (code[..., 1] << 4)).view(torch.int8)
        self.tensors[name + ".scale"] = scale.view(torch.float8_e8m0fnu)

    def expert(self, name: str, rows: int, cols: int, gain: float) -> None:
        write = self.fp8 if self.config.get("expert_dtype", "fp4") == "fp8" else self.fp4
        write(name, rows, cols, gain)

    def hyper_connection(self, name: str) -> None:
        flat = STREAMS * self.config["hidden_size"]
        self.fp32(name + "_fn", self.normal(24, flat, std=flat**-0.5))
        self.fp32(name + "_base", self.normal(24, std=0.5))
        self.fp32(name + "_scale", 0.5 + self.normal(3, std=0.1).abs())

    def head_mix(self, prefix: str) -> None:
        flat = STREAMS * self.config["hidden_size"]
        self.fp32(prefix + "hc_head_fn", self.normal(STREAMS, flat, std=flat**-0.5))
        self.fp32(prefix + "hc_head_base", self.normal(STREAMS, std=0.5))
        self.fp32(prefix + "hc_head_scale", 0.5 + self.normal(1, std=0.1).abs())

    def compressor(self, name: str, width: int, ratio: int) -> None:
        hidden, columns = self.config["hidden_size"], width * (2 if ratio == 4 else 1)
        self.fp32(name + ".ape", self.normal(ratio, columns, std=0.5))
        self.bf16(name + ".wkv.weight", self.normal(columns, hidden, std=hidden**-0.5))
        self.bf16(name + ".wgate.weight", self.normal(columns, hidden, std=hidden**-0.5))
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
        self.fp32(name + ".attn_sink", self.normal(heads))
        if ratio:
            self.compressor(name + ".compressor", HEAD_DIM, ratio)
        if ratio == 4:
            self.fp8(name + ".indexer.wq_b", c["index_n_heads"] * INDEX_DIM, rank)
            self.bf16(name + ".indexer.weights_proj.weight",
                      self.normal(c["index_n_heads"], hidden, std=hidden**-0.5))
            self.compressor(name + ".indexer.compressor", INDEX_DIM, 4)

    def experts(self, name: str, hashed: bool) -> None:
        c = self.config
        hidden, inter, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        self.bf16(name + ".gate.weight", self.normal(count, hidden, std=hidden**-0.5))
        if hashed:
            order = torch.rand(c["vocab_size"], count, generator=self.generator).argsort(1)
            self.tensors[name + ".gate.tid2eid"] = order[:, : c["num_experts_per_tok"]].contiguous()
        else:
            self.fp32(name + ".gate.bias", self.normal(count, std=0.1))
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
        self.bf16(last + "markov_head.markov_w1.weight", self.normal(vocab, rank))
        self.bf16(last + "markov_head.markov_w2.weight", self.normal(vocab, rank, std=rank**-0.5))
        self.fp32(last + "confidence_head.proj.weight",
                  self.normal(1, hidden + rank, std=(hidden + rank) ** -0.5))

    def model(self) -> dict[str, torch.Tensor]:
        c = self.config
        hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
        self.bf16("embed.weight", self.normal(vocab, hidden))
        for n in range(layers):
            self.block(f"layers.{n}", c["compress_ratios"][n], n < c["num_hash_layers"])
        self.head_mix("")
        self.norm("norm", hidden)
        self.bf16("head.weight", self.normal(vocab, hidden, std=hidden**-0.5))
        stages = len(c["compress_ratios"]) - layers
        if "dspark_block_size" in c:
            self.dspark(stages)
        elif stages:
            self.mtp()
        return self.tensors


def make_checkpoint(config: dict, seed: int, folder: str | Path, shards: int = 1) -> Path:
    """Writes config.json and the tensors; `shards` > 1 also writes the index file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = Writer(config, seed).model()
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
