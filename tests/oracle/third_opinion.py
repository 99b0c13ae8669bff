"""The model family's own inference/model.py as an oracle, its kernels replaced by plain torch.

The file is not part of this project: fetch a copy and give its path. Its module `kernel` (and
`fast_hadamard_transform`) is replaced by functions that round at the same points. It has no chunked
prefill; `decode_from` runs the prompt up to there at once and then token by token.

    python third_opinion.py path/to/inference/model.py [--configs 4]

Alone it holds numerics.py against the reference: the reference chooses and runs freely, and
numerics.py replays every layer on the reference's own streams, as compare.py does with the binary.
Its index scores are BF16, so its choices are expected to differ where scores are close.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
import types

import torch
import torch.nn.functional as F

import numerics as ops
from check_numerics import describe
from checkpoint import Checkpoint, dequantize_fp4, dequantize_fp8, scale_values
from compare import BF16_FLIPS, Result, compare_official, random_tokens, verdict
from make_checkpoint import make_checkpoint, random_config
from numerics import Numerics
from numerics_drafts import Mtp
from numerics_model import Choice, Choices, Model, judge

OFFICIAL = Numerics("official")
ARGUMENTS = {  # of the reference, and what config.json calls them
    "vocab_size": "vocab_size", "dim": "hidden_size", "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers", "n_hash_layers": "num_hash_layers",
    "n_heads": "num_attention_heads", "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts", "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func", "route_scale": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit", "q_lora_rank": "q_lora_rank", "head_dim": "head_dim",
    "rope_head_dim": "qk_rope_head_dim", "norm_eps": "rms_norm_eps", "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank", "window_size": "sliding_window",
    "compress_ratios": "compress_ratios", "compress_rope_theta": "compress_rope_theta",
    "rope_theta": "rope_theta", "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim", "index_topk": "index_topk", "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters", "hc_eps": "hc_eps",
}


# --- the kernels the reference imports ---


def act_quant(x, block_size=128, scale_fmt=None, scale_dtype=torch.float32, inplace=False):
    if inplace:
        return x.copy_(ops.through_fp8(x.float(), block_size))
    codes, exponent = ops.quantize_fp8(x.float(), block_size)
    return codes, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp4_act_quant(x, block_size=32, inplace=False):
    assert inplace and block_size == ops.FP4_BLOCK
    return x.copy_(ops.through_fp4(x.float()))


def fp8_gemm(a, a_s, b, b_s, scale_dtype=torch.float32):
    """Also its fp4_gemm; the weight is dequantized once."""
    if not hasattr(b, "values_kept"):
        fp8 = b.dtype == torch.float8_e4m3fn
        b.values_kept = dequantize_fp8(b, b_s) if fp8 else dequantize_fp4(b.view(torch.int8), b_s)
    x = a.float() * scale_values(a_s).repeat_interleave(128, -1)
    return ops.dot(x, b.values_kept).to(torch.bfloat16)


def sparse_attn(q, kv, attn_sink, topk_idxs, softmax_scale):
    out = torch.empty_like(q)
    for begin in range(0, q.shape[1], 128):
        rows = slice(begin, begin + 128)
        mask = ops.selection_mask(topk_idxs[0, rows], kv.shape[1])
        used = mask.any(0)
        out[0, rows] = ops.attend(
            q[0, rows].float(), kv[0, used].float(), mask[:, used], attn_sink, OFFICIAL
        ).to(q.dtype)
    return out


def hc_split_sinkhorn(mixes, hc_scale, hc_base, hc_mult=4, sinkhorn_iters=20, eps=1e-6):
    part = [slice(0, 4), slice(4, 8), slice(8, 24)]
    pre, post, comb = (mixes[..., p] * s + hc_base[p] for p, s in zip(part, hc_scale))
    comb = torch.softmax(comb.unflatten(-1, (4, 4)), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), comb


def hadamard_transform(x, scale=1.0):
    product = ops.dot(x.float(), ops.hadamard_matrix(x.shape[-1]))
    return (product.double() * scale).to(x.dtype)


class Exact:
    """A module whose BF16 operators round once, at the end, as on the reference's own device.

    On a CPU torch may round inside them: partial sums of a product, the root in rsqrt.
    """

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name):
        return getattr(self._original, name)

    @staticmethod
    def einsum(equation, *operands):
        return torch.einsum(equation, *(o.double() for o in operands)).to(operands[0].dtype)

    @staticmethod
    def rsqrt(x):
        return torch.rsqrt(x.float()).to(x.dtype)

    @staticmethod
    def linear(x, weight):
        return ops.dot(x.float(), weight.float()).to(x.dtype)


def load_module(path: str):
    kernel = types.ModuleType("kernel")
    for function in (act_quant, fp4_act_quant, fp8_gemm, sparse_attn, hc_split_sinkhorn,
                     hadamard_transform):
        setattr(kernel, function.__name__, function)
    kernel.fp4_gemm = fp8_gemm
    sys.modules["kernel"] = sys.modules["fast_hadamard_transform"] = kernel
    spec = importlib.util.spec_from_file_location("reference_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_model"] = module
    spec.loader.exec_module(module)
    module.torch, module.F = Exact(torch), Exact(F)
    # Log-probabilities are wanted at every position, not only the last.
    module.ParallelHead.get_logits = lambda self, x: ops.dot(x.float(), self.weight)
    return module


def arguments(module, config: dict, length: int):
    scaling = config["rope_scaling"]
    fields = {name: config[source] for name, source in ARGUMENTS.items()}
    fields["compress_ratios"] = tuple(fields["compress_ratios"])
    mtp = 0 if "dspark_block_size" in config else (
        len(config["compress_ratios"]) - config["num_hidden_layers"])
    return module.ModelArgs(
        **fields, max_batch_size=1, max_seq_len=length, dtype="fp8", scale_fmt="ue8m0",
        scale_dtype="fp8", expert_dtype="fp4" if config["expert_dtype"] == "fp4" else None,
        n_mtp_layers=mtp, original_seq_len=scaling["original_max_position_embeddings"],
        rope_factor=scaling["factor"], beta_fast=scaling["beta_fast"],
        beta_slow=scaling["beta_slow"])


class Reference:
    def __init__(self, path: str, checkpoint: Checkpoint, length: int = 2048):
        self.config = checkpoint.config
        self.module = load_module(path)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.model = self.module.Transformer(
                arguments(self.module, checkpoint.config, length))
        finally:
            torch.set_default_dtype(previous)
        self._load(checkpoint)
        self._hooks()

    def _load(self, checkpoint: Checkpoint) -> None:
        stored = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
        shared = ("mtp.0.embed.", "mtp.0.head.")
        for name, parameter in self.model.named_parameters():
            if name.startswith(shared):
                continue
            if parameter.dtype in stored:
                value = checkpoint.raw(name).view(parameter.dtype)
            else:
                value = checkpoint.values(name).to(parameter.dtype)
            assert value.shape == parameter.shape, name
            parameter.data = value

    def _hooks(self) -> None:
        for layer, block in enumerate(self.model.layers):
            block.register_forward_hook(self._block_hook(layer))
            if not block.ffn.gate.hash:
                block.ffn.gate.register_forward_hook(self._gate_hook(layer))
            if getattr(block.attn, "indexer", None) is not None:
                block.attn.indexer.register_forward_hook(self._index_hook(layer))

    def _block_hook(self, layer: int):
        def hook(_, __, output):
            self._after[layer].append(output[0].float())
            anchor = self._anchors.get(layer)
            last = layer == self.config["num_hidden_layers"] - 1
            if anchor is None or last:
                return None
            return anchor[self._rows].to(output.dtype)[None]

        return hook

    def _gate_hook(self, layer: int):
        def hook(gate, inputs, output):
            weights, free = output
            scores = ops.routing_scores(inputs[0].float(), gate.weight.float())
            used = free
            if layer in self._routing:
                used = self._routing[layer][self._rows]
                weights = ops.routing_weights(scores, used, gate.route_scale)
            self._choices["routing"].setdefault(layer, []).append(
                judge(scores + gate.bias, used, free))
            return weights, used

        return hook

    def _index_hook(self, layer: int):
        def hook(_, inputs, output):
            offset = inputs[3]
            free = torch.where(output[0] < 0, -1, output[0] - offset)
            pad = self.config["index_topk"] - free.shape[1]
            free = F.pad(free, (0, pad), value=-1).sort(-1, descending=True).values
            used = free
            if layer in self._index:
                used = self._index[layer][self._rows].sort(-1, descending=True).values
            flipped = (used != free).any(1)
            # Its scores stay inside; the gap is unknown.
            self._choices["index"].setdefault(layer, []).append(
                Choice(used, free, torch.full((len(used),), math.nan), flipped))
            return torch.where(used < 0, -1, used + offset)[None]

        return hook

    @torch.inference_mode()
    def replay(self, tokens, force_routing=None, force_index=None, anchors=None,
               decode_from: int | None = None):
        """Logits, choices, and the streams after each layer, as numerics_model.Model.replay."""
        self._routing, self._index = force_routing or {}, force_index or {}
        self._anchors = anchors or {}
        self._choices = {"routing": {}, "index": {}}
        self._after = {n: [] for n in range(self.config["num_hidden_layers"])}
        self._forget()
        ids = torch.as_tensor(tokens, dtype=torch.int64)[None]
        length = ids.shape[1]
        first = length if decode_from is None else decode_from
        logits = []
        for begin, end in [(0, first)] + [(i, i + 1) for i in range(first, length)]:
            self._rows = slice(begin, end)
            logits.append(self._step(ids[:, begin:end], begin))
        after = [torch.cat(parts) for parts in self._after.values()]
        return torch.cat(logits), self._collected(), after

    def _forget(self) -> None:
        """A new sequence: the reference itself keeps the last one's half-filled groups."""
        for module in self.model.modules():
            if hasattr(module, "score_state"):
                module.kv_state.zero_()
                module.score_state.fill_(-math.inf)

    def _step(self, ids, start):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return self.model(ids, start)[0].clone()
        finally:
            torch.set_default_dtype(previous)

    def _collected(self) -> Choices:
        merged = Choices()
        for kind, layers in self._choices.items():
            for layer, parts in layers.items():
                fields = [torch.cat([getattr(p, f) for p in parts])
                          for f in ("used", "free", "gap", "flipped")]
                getattr(merged, kind)[layer] = Choice(*fields)
        return merged

    @torch.inference_mode()
    def mtp(self, streams, next_tokens):
        ids = torch.as_tensor(next_tokens, dtype=torch.int64)[None]
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return self.model.mtp[0](streams.to(torch.bfloat16)[None], 0, ids)[0].clone()
        finally:
            torch.set_default_dtype(previous)


def as_result(reference: Reference, sequences, decode: bool) -> Result:
    """Runs the reference freely and presents it as compare.py presents the binary."""
    result = Result({}, {}, {}, {})
    for number, tokens in enumerate(sequences):
        first = max(1, len(tokens) // 2) if decode else None
        logits, choices, after = reference.replay(tokens, decode_from=first)
        result.logits[number] = logits
        result.routing[number] = {k: c.used for k, c in choices.routing.items()}
        result.index[number] = {k: c.used for k, c in choices.index.items()}
        result.streams[number] = dict(enumerate(after))
    return result


def check_mtp(reference: Reference, model: Model, tokens, streams) -> bool:
    theirs = reference.mtp(streams[:-1], tokens[1:])
    ours, _ = Mtp(model).extend(streams[:-1], tokens[1:])
    difference = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().amax(1)
    fine = float(difference.median()) <= 1e-4
    print(f"  mtp        length {len(tokens):5d}  median {difference.median():.1e}  "
          f"max {difference.max():.1e}  {verdict(fine)}")
    return fine


def check(path: str, seed: int, lengths) -> bool:
    config = random_config(seed, "fp8" if seed % 3 == 2 else "fp4", "mtp")
    print(f"config {seed}: {describe(config)}")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(make_checkpoint(config, seed, folder))
        reference, model = Reference(path, checkpoint), Model(checkpoint, OFFICIAL)
        echo = Model(checkpoint, Numerics("official", order="blocks"))
        sequences = [random_tokens(config["vocab_size"], n, seed) for n in lengths]
        for label, decode in (("prefill", False), ("decode", True)):
            result = as_result(reference, sequences, decode)
            good &= compare_official(label, model, echo, sequences, result, BF16_FLIPS)
        streams = result.streams[len(sequences) - 1][config["num_hidden_layers"] - 1]
        good &= check_mtp(reference, model, sequences[-1], streams)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", help="path of the reference's inference/model.py")
    parser.add_argument("--configs", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lengths", default="1,4,5,130,300")
    args = parser.parse_args()
    torch.set_num_threads(2)
    lengths = [int(n) for n in args.lengths.split(",")]
    seeds = range(args.first_seed, args.first_seed + args.configs)
    results = [check(args.reference, seed, lengths) for seed in seeds]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
