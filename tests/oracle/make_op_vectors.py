"""Writes random inputs and expected outputs of every operator to tests/golden/ops.

Names: inputs plain; outputs `official.NAME` and `fp32.NAME`, or plain where both modes agree.
Scalars are a JSON object in the file's metadata, key `scalars`. tests/golden/README.md lists shapes
and tolerances; each file stays below 200 KB.

    python make_op_vectors.py [--out ../golden/ops]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import numerics as ops
from checkpoint import dequantize_fp4, dequantize_fp8
from make_checkpoint import Recipes, base_config
from numerics import Numerics, Weight

EPS, HC_EPS, SEED = 1e-6, 1e-6, 7
OFFICIAL, FP32 = Numerics("official"), Numerics("fp32")
MODES = {"official": OFFICIAL, "fp32": FP32}


def bf16(*shape: int, std: float = 1.0) -> torch.Tensor:
    return ops.round_bf16(torch.randn(shape) * std)


def scale_bytes(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent + 127).to(torch.uint8)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """FP4 codes two a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """FP32 that holds BF16 values, as BF16."""
    narrow = tensor.to(torch.bfloat16)
    assert torch.equal(narrow.float(), tensor), "the tensor is not exact in BF16"
    return narrow


def quantized_matrix(kind: str, rows: int, cols: int) -> tuple[dict, Weight]:
    recipes = Recipes(base_config())
    recipes.quantized("w", kind, rows, cols)
    weight, scale = (recipes.all[n].tensor(n, SEED) for n in ("w.weight", "w.scale"))
    values = (dequantize_fp8 if kind == "fp8" else dequantize_fp4)(weight, scale)
    return {"weight": weight, "scale": scale}, Weight(values, True)


def both(function) -> dict[str, torch.Tensor]:
    """`function(numerics)` gives named outputs; official ones that fit are stored as BF16."""
    out = {}
    for mode, n in MODES.items():
        for name, value in function(n).items():
            out[f"{mode}.{name}"] = value
    return out


def awkward_rows(width: int, top: float) -> torch.Tensor:
    """Rows for the edges of quantization: zeros, tiny, huge, ties, exact powers, signed zero."""
    rows = bf16(16, width, std=3.0)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] *= 2.0**-120
    rows[3] *= 2.0**60
    rows[4] = ops.round_bf16(torch.linspace(-top, top, width))
    rows[5, 1:] *= 2.0**-20
    rows[6] = torch.exp2(torch.randint(-12, 4, (width,)).float())
    rows[7] = torch.arange(width).float() % 33 * 0.25
    rows[8] = 1e-4 * torch.rand(width)
    rows[9, 0] = top * 2
    rows[10, 0] = 1.0039 * top
    return ops.round_bf16(rows)


def quantize_fp8(block: int, width: int):
    x = awkward_rows(width, 448.0)
    codes, exponent = ops.quantize_fp8(x, block)
    return {"x": stored(x), "codes": codes, "scales": scale_bytes(exponent),
            "values": stored(ops.through_fp8(x, block))}, {"block": block}


def quantize_fp4():
    x = awkward_rows(128, 6.0)
    codes, exponent = ops.quantize_fp4(x)
    return {"x": stored(x), "codes": packed(codes), "scales": scale_bytes(exponent),
            "values": stored(ops.through_fp4(x))}, {"block": 32}


def linear(kind: str, rows: int, cols: int):
    tensors, weight = quantized_matrix(kind, rows, cols)
    x = bf16(7, cols, std=2.0)
    return {"x": stored(x)} | tensors | both(lambda n: {"y": ops.linear(x, weight, n)}), {}


def linear_bf16():
    x, weight = bf16(7, 384, std=2.0), bf16(64, 384, std=0.05)
    out = both(lambda n: {"y": ops.linear(x, Weight(weight, False), n)})
    return {"x": stored(x), "weight": stored(weight), "y_unrounded": ops.dot(x, weight)} | out, {}


def rms_norm():
    x, weight = bf16(9, 384, std=3.0), bf16(384)
    x[1] = 0
    x[2] *= 2.0**-20
    return {"x": stored(x), "weight": stored(weight)} | both(
        lambda n: {"y": ops.rms_norm(x, weight, EPS, n)}), {"eps": EPS}


def head_norm():
    q = bf16(5, 3, 512, std=2.0)
    q[1, 0] = 0
    return {"q": stored(q)} | both(lambda n: {"y": ops.head_norm(q, EPS, n)}), {"eps": EPS}


def rope():
    config = base_config()
    positions = torch.tensor([0, 1, 3, 127, 128, 4095, 65535, 65536, 262143, 1048575])
    x = bf16(len(positions), 2, 128)
    out = {"x": stored(x), "positions": positions.to(torch.int32)}
    for name, base, yarn in (
        ("plain", config["rope_theta"], None),
        ("yarn", config["compress_rope_theta"], config["rope_scaling"]),
    ):
        freq = ops.rope_frequencies(base, yarn)
        tables = ops.rope_tables(freq, positions)
        out |= {f"{name}.frequencies": freq, f"{name}.cos": tables[0], f"{name}.sin": tables[1]}
        out |= both(lambda n: {f"{name}.forward": ops.rope(x, tables, n),
                               f"{name}.inverse": ops.rope(x, tables, n, inverse=True)})
    return out, {"theta": config["rope_theta"], "compress_theta": config["compress_rope_theta"],
                 "factor": 16, "original": 65536, "beta_fast": 32, "beta_slow": 1}


def hyper_connection():
    streams, y = bf16(6, 4, 128, std=2.0), bf16(6, 128, std=2.0)
    fn, base, scale = torch.randn(24, 512) * 0.05, torch.randn(24), torch.rand(3) + 0.3
    streams[1] = 0
    mix = ops.hc_mix(streams, fn, base, scale, EPS, HC_EPS, 20, Numerics("fp32"))
    head_fn, head_base, head_scale = torch.randn(4, 512) * 0.05, torch.randn(4), torch.rand(1)

    def outputs(n):
        return {"in": ops.hc_gather(streams, mix.pre, n),
                "out": ops.hc_scatter(y, mix, streams, n),
                "head": ops.hc_head(streams, head_fn, head_base, head_scale, EPS, HC_EPS, n)}

    return {"streams": stored(streams), "y": stored(y), "fn": fn, "base": base, "scale": scale,
            "head_fn": head_fn, "head_base": head_base, "head_scale": head_scale,
            "pre": mix.pre, "post": mix.post, "comb": mix.comb} | both(outputs), {
                "norm_eps": EPS, "hc_eps": HC_EPS, "iterations": 20}


def compressor(ratio: int, width: int, tokens: int):
    """FP8 storage keeps the file small: the values themselves are exact FP32 inputs."""
    columns = width * (2 if ratio == 4 else 1)
    content, gate, ape = (
        (torch.randn(n, columns) * s).to(torch.float8_e4m3fn)
        for n, s in ((tokens, 1.0), (tokens, 3.0), (ratio, 1.0)))
    gate[3] = 40.0
    pooled = ops.compressor_pool(content.float(), gate.float(), ape.float(), ratio, Numerics("fp32"))
    return {"content": content, "gate": gate, "ape": ape, "pooled": pooled}, {"ratio": ratio}


def kv_entry():
    """From pooled rows (FP32) to stored entries, at the compressed rope positions."""
    config = base_config()
    freq = ops.rope_frequencies(config["compress_rope_theta"], config["rope_scaling"])
    pooled, norm = torch.randn(6, 512) * 2, bf16(512)
    out = {"pooled": pooled, "norm": stored(norm)}
    for ratio in (4, 128):
        for mode, n in MODES.items():
            entry = ops.compressed_entries(pooled, norm, EPS, freq, ratio, n)
            out[f"{mode}.entry_{ratio}"] = ops.quantize_kv(entry, n)
            if n.official:
                codes, exponent = ops.quantize_fp8(entry[:, : ops.NOPE_DIM], ops.KV_BLOCK)
                out[f"codes_{ratio}"], out[f"scales_{ratio}"] = codes, scale_bytes(exponent)
                out[f"rotary_{ratio}"] = stored(entry[:, ops.NOPE_DIM :])
    return out, {"eps": EPS}


def index_vectors():
    x = bf16(24, 128, std=2.0)
    x[1] = 0
    rotated = ops.hadamard(x, OFFICIAL)
    codes, exponent = ops.quantize_fp4(rotated)
    fp8, fp8_exponent = ops.quantize_fp8(rotated, 128)
    return {"x": stored(x), "rotated": stored(rotated), "codes": packed(codes),
            "scales": scale_bytes(exponent), "values": stored(ops.through_fp4(rotated)),
            "fp8_codes": fp8, "fp8_scales": scale_bytes(fp8_exponent)}, {}


def index_scores():
    q = ops.through_fp4(bf16(13, 16, 128))
    k = ops.through_fp4(bf16(61, 128))
    k[7] = k[40]
    projected = bf16(13, 16)
    positions = torch.tensor([0, 2, 3, 4, 7, 31, 63, 64, 127, 200, 239, 243, 500])
    weights = ops.index_weights(projected, OFFICIAL)
    scores = ops.index_scores(q, k, weights)
    visible = ops.visible_entries(positions, 61, 4)
    return {"q": stored(q), "k": stored(k), "projected": stored(projected),
            "positions": positions.to(torch.int32), "weights": stored(weights), "scores": scores,
            "selected": ops.select_entries(scores, visible, 16).to(torch.int32)}, {"topk": 16}


def sparse_attention():
    q, keys = bf16(5, 4, 512), ops.quantize_kv(bf16(90, 512), OFFICIAL)
    sink = torch.tensor([-3.0, 0.0, 2.0, 30.0])
    mask = torch.rand(5, 90) < 0.7
    mask[0] = False
    mask[0, 17] = True
    mask[1] = True
    inputs = {"q": stored(q), "keys": stored(keys), "mask": mask.to(torch.uint8), "sink": sink}
    return inputs | both(lambda n: {"o": ops.attend(q, keys, mask, sink, n)}), {}


def grouped_output():
    tensors, weight = quantized_matrix("fp8", 128, 1024)
    o = bf16(5, 4, 512)
    return {"o": stored(o)} | tensors | both(
        lambda n: {"y": ops.grouped_output(o, weight.values, 2, n)}), {"groups": 2}


def routing():
    x, gate, bias = bf16(40, 256, std=2.0), bf16(24, 256, std=0.06), torch.randn(24) * 0.1
    gate[9], bias[9] = gate[4], bias[4]
    scores = ops.routing_scores(x, gate)
    ids = ops.top_indices(scores + bias, 6)
    return {"x": stored(x), "gate": stored(gate), "bias": bias, "scores": scores,
            "ids": ids.to(torch.int32), "weights": ops.routing_weights(scores, ids, 1.5)}, {
                "topk": 6, "scaling": 1.5}


def expert(kind: str):
    tensors, weights = {}, {}
    for name in ("w1", "w2", "w3"):
        recipes = Recipes(base_config())
        recipes.quantized(name, kind, 128, 128)
        weight, scale = (recipes.all[n].tensor(n, SEED) for n in recipes.all)
        values = (dequantize_fp8 if kind == "fp8" else dequantize_fp4)(weight, scale)
        tensors |= {f"{name}.weight": weight, f"{name}.scale": scale}
        weights[name] = Weight(values, True)
    x, weight = bf16(6, 128, std=8.0), torch.rand(6)

    def outputs(n):
        return {"routed": ops.expert(x, **weights, limit=10.0, weight=weight, n=n),
                "shared": ops.expert(x, **weights, limit=10.0, weight=None, n=n),
                "unclamped": ops.expert(x, **weights, limit=0.0, weight=None, n=n)}

    return {"x": stored(x), "weight": weight} | tensors | both(outputs), {"limit": 10.0}


CASES = {
    "quantize_fp8_128": lambda: quantize_fp8(128, 256),
    "quantize_fp8_64": lambda: quantize_fp8(64, 448),
    "quantize_fp4": quantize_fp4,
    "linear_fp8": lambda: linear("fp8", 256, 384),
    "linear_fp8_ragged": lambda: linear("fp8", 192, 256),
    "linear_fp4": lambda: linear("fp4", 256, 384),
    "linear_bf16": linear_bf16,
    "rms_norm": rms_norm,
    "head_norm": head_norm,
    "rope": rope,
    "hyper_connection": hyper_connection,
    "compressor_4": lambda: compressor(4, 512, 18),
    "compressor_4_index": lambda: compressor(4, 128, 15),
    "compressor_128": lambda: compressor(128, 512, 128),
    "kv_entry": kv_entry,
    "index_vectors": index_vectors,
    "index_scores": index_scores,
    "sparse_attention": sparse_attention,
    "grouped_output": grouped_output,
    "routing": routing,
    "expert_fp4": lambda: expert("fp4"),
    "expert_fp8": lambda: expert("fp8"),
}


def narrow_official(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: stored(t) if name.startswith("official.") else t.contiguous()
            for name, t in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).parent.parent / "golden" / "ops", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(1000 + number)
        tensors, scalars = case()
        path = args.out / f"{name}.safetensors"
        # One metadata key: the library writes several in no fixed order.
        save_file(narrow_official(tensors), path, {"scalars": json.dumps(scalars)})
        path.chmod(0o644)
        size = path.stat().st_size
        assert size < 200_000, f"{path} has {size} bytes, the limit is 200000"
        print(f"{path.name:32s} {size:7d}")


if __name__ == "__main__":
    main()
