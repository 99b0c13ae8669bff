"""The operators of DeepSeek-V4 in plain CPU torch, with the rounding points of the official code.

Written from the model's specification alone, as an independent opinion: small pure functions that
favour being checked over being fast. Tensors are FP32 and hold BF16 values wherever the model
rounds to BF16. The order of sums is `Numerics.sums` (sums.py), FP64 by default.

`Numerics("official")` rounds where the reference rounds; `Numerics("fp32")` rounds nothing, leaves
the Hadamard rotation out, and uses the exactly dequantized weights.
Shapes: T tokens, H hidden size, A heads, E compressed entries, r compress ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sums import ORDERS, WideSums

HEAD_DIM, ROPE_DIM, WINDOW, STREAMS = 512, 64, 128, 4
NOPE_DIM = HEAD_DIM - ROPE_DIM
KV_BLOCK, ACTIVATION_BLOCK, FP4_BLOCK = 64, 128, 32
FP4_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Numerics:
    mode: str
    # "fp4" is the model's own; "fp8" is the option use_fp4_indexer_cache=false.
    index_cache: str = "fp4"
    order: str = "wide"  # of sums: wide, blocks or canonical

    def __post_init__(self):
        if self.mode not in ("official", "fp32"):
            raise ValueError(f"numerics is {self.mode!r}, expected official or fp32")
        if self.index_cache not in ("fp4", "fp8"):
            raise ValueError(f"index cache is {self.index_cache!r}, expected fp4 or fp8")

    @property
    def sums(self) -> WideSums:
        return ORDERS[self.order]

    @property
    def official(self) -> bool:
        return self.mode == "official"

    def b(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds to BF16, nearest even, where the mode rounds at all."""
        return round_bf16(x) if self.official else x


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] as exact FP32, and whether its activations are quantized."""

    values: torch.Tensor
    quantized: bool


# --- rounding and quantization -------------------------------------------------------------------


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def ceil_power_of_two_exponent(x: torch.Tensor) -> torch.Tensor:
    """The exponent e of the smallest 2^e >= x, from the bits of a positive normal FP32."""
    bits = x.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def pow2(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent).float()


def quantize_fp8(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [..., K] (float8_e4m3fn) and exponents [..., K/block] of the block scales."""
    blocks = x.unflatten(-1, (x.shape[-1] // block, block))
    amax = blocks.abs().amax(-1).clamp(min=torch.tensor(1e-4, dtype=torch.float32))
    exponent = ceil_power_of_two_exponent(amax * torch.tensor(1 / 448, dtype=torch.float32))
    scaled = (blocks / pow2(exponent)[..., None]).clamp(-448.0, 448.0)
    return scaled.reshape(x.shape).to(torch.float8_e4m3fn), exponent


def through_fp8(x: torch.Tensor, block: int) -> torch.Tensor:
    codes, exponent = quantize_fp8(x, block)
    return codes.float() * pow2(exponent).repeat_interleave(block, -1)


def quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 codes 0..15 [..., K] (uint8, one a byte) and exponents [..., K/32]."""
    blocks = x.unflatten(-1, (x.shape[-1] // FP4_BLOCK, FP4_BLOCK))
    amax = blocks.abs().amax(-1).clamp(min=6 * 2.0**-126)
    exponent = ceil_power_of_two_exponent(amax * torch.tensor(1 / 6, dtype=torch.float32))
    # The magnitude in FP64: dividing by 2^-126 must not overflow, the clamp comes after.
    size = (blocks.abs().double() / pow2(exponent)[..., None].double()).clamp(max=6.0)
    code = torch.zeros(size.shape, dtype=torch.uint8)
    # Halfway cases go to the even code: up at .75, 1.75 and 3.5, down at .25, 1.25, 2.5 and 5.
    for bound in (0.25, 1.25, 2.5, 5.0):
        code += size > bound
    for bound in (0.75, 1.75, 3.5):
        code += size >= bound
    code |= torch.signbit(blocks).to(torch.uint8) << 3
    return code.reshape(x.shape), exponent


def through_fp4(x: torch.Tensor) -> torch.Tensor:
    code, exponent = quantize_fp4(x)
    signed = FP4_GRID[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)
    return signed * pow2(exponent).repeat_interleave(FP4_BLOCK, -1)


# --- products and norms --------------------------------------------------------------------------


def dot(x: torch.Tensor, w: torch.Tensor, sums: WideSums = ORDERS["wide"]) -> torch.Tensor:
    """x [..., K] times w [N, K] transposed, in FP32."""
    return sums.dot(x, w)


def linear(x: torch.Tensor, w: Weight, n: Numerics) -> torch.Tensor:
    """A product whose result the model keeps in BF16; quantized weights quantize x per token."""
    if n.official and w.quantized:
        x = through_fp8(x, ACTIVATION_BLOCK)
    return n.b(dot(x, w.values, n.sums))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, n: Numerics) -> torch.Tensor:
    return n.b(x * torch.rsqrt(n.sums.mean_square(x) + eps) * weight)


def head_norm(q: torch.Tensor, eps: float, n: Numerics) -> torch.Tensor:
    """The norm of every query head; it has no weight and rounds at each step."""
    m = n.b(n.sums.mean(n.b(q.square())))
    return n.b(q * n.b(torch.rsqrt(n.b(m + eps))))


# --- rotary positions ----------------------------------------------------------------------------


def rope_frequencies(base: float, yarn: dict | None) -> torch.Tensor:
    """32 frequencies, FP32. `yarn` is config.json's rope_scaling, or None without scaling."""
    exponent = torch.arange(0, ROPE_DIM, 2, dtype=torch.float32) / ROPE_DIM
    freq = 1.0 / torch.pow(torch.tensor(base, dtype=torch.float64), exponent.double()).float()
    if yarn is None:
        return freq

    def correction(turns: float) -> float:
        original = yarn["original_max_position_embeddings"]
        return ROPE_DIM * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(correction(yarn["beta_fast"])), 0)
    high = min(math.ceil(correction(yarn["beta_slow"])), ROPE_DIM - 1)
    span = (high - low) if high != low else 0.001
    ramp = ((torch.arange(ROPE_DIM // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return freq / yarn["factor"] * ramp + freq * (1 - ramp)


def rope_tables(freq: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [T, 32] of the FP32 angles."""
    angle = positions.float()[:, None] * freq
    return torch.cos(angle.double()).float(), torch.sin(angle.double()).float()


def rope(
    x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], n: Numerics, inverse: bool = False
) -> torch.Tensor:
    """Rotates the last 64 channels of x [T, ..., D] in adjacent pairs."""
    cos, sin = (t.reshape(t.shape[0], *([1] * (x.dim() - 2)), t.shape[1]) for t in tables)
    sin = -sin if inverse else sin
    a, c = x[..., -ROPE_DIM::2], x[..., -ROPE_DIM + 1 :: 2]
    turned = torch.stack((a * cos - c * sin, a * sin + c * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-ROPE_DIM], n.b(turned)), dim=-1)


# --- hyper-connections ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Mix:
    """Per token: how streams enter a sub-layer (pre), leave it (post) and mix (comb[j][k])."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def hc_project(
    streams: torch.Tensor, fn: torch.Tensor, norm_eps: float, n: Numerics
) -> torch.Tensor:
    flat = streams.flatten(1)
    return dot(flat, fn, n.sums) * torch.rsqrt(n.sums.mean_square(flat) + norm_eps)


def hc_mix(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
    norm_eps: float, hc_eps: float, iterations: int, n: Numerics,
) -> Mix:
    """streams [T, 4, H], fn [24, 4H], base [24], scale [3]. FP32 in both modes."""
    mixes, sums = hc_project(streams, fn, norm_eps, n), n.sums
    pre = sums.sigmoid(mixes[:, 0:4] * scale[0] + base[0:4]) + hc_eps
    post = 2 * sums.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    logits = (mixes[:, 8:] * scale[2] + base[8:]).reshape(-1, STREAMS, STREAMS)
    comb = sums.exp(logits - logits.amax(2, keepdim=True))
    comb = comb / sums.add(comb, 2) + hc_eps
    comb = comb / (sums.add(comb, 1) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (sums.add(comb, 2) + hc_eps)
        comb = comb / (sums.add(comb, 1) + hc_eps)
    return Mix(pre, post, comb)


def hc_gather(streams: torch.Tensor, pre: torch.Tensor, n: Numerics) -> torch.Tensor:
    return n.b(n.sums.add(pre[..., None] * streams, 1)[:, 0])


def hc_scatter(y: torch.Tensor, mix: Mix, streams: torch.Tensor, n: Numerics) -> torch.Tensor:
    return n.b(n.sums.scatter(y, mix.post, mix.comb, streams))


def hc_head(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
    norm_eps: float, hc_eps: float, n: Numerics,
) -> torch.Tensor:
    """The four streams as one [T, H]: fn [4, 4H], base [4], scale [1]."""
    mixes = hc_project(streams, fn, norm_eps, n)
    pre = n.sums.sigmoid(mixes * scale + base) + hc_eps
    return hc_gather(streams, pre, n)


# --- compressed entries --------------------------------------------------------------------------


def pooled_rows(x: torch.Tensor, ratio: int, width: int, empty: float) -> torch.Tensor:
    """Rows pooled by each entry: [E, 128, width] for ratio 128, [E, 8, width] for ratio 4.

    Ratio 4 overlaps: the first half of the columns belongs to the entry after the row's own
    group, the second half to its own. Entry 0 has no group before it, which `empty` fills.
    """
    entries = x.shape[0] // ratio
    groups = x[: entries * ratio].reshape(entries, ratio, x.shape[1])
    if ratio != 4:
        return groups
    before = torch.full((entries, ratio, width), empty)
    before[1:] = groups[:-1, :, :width]
    return torch.cat((before, groups[..., width:]), dim=1)


def compressor_pool(
    content: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, ratio: int, n: Numerics
) -> torch.Tensor:
    """content, gate [T, columns] FP32 -> [T // ratio, width]; softmax over rows per channel."""
    width = content.shape[1] // (2 if ratio == 4 else 1)
    tokens = content.shape[0]
    gate = gate + ape[torch.arange(tokens) % ratio]
    return n.sums.pool(
        pooled_rows(gate, ratio, width, -math.inf), pooled_rows(content, ratio, width, 0.0))


def quantize_kv(entry: torch.Tensor, n: Numerics) -> torch.Tensor:
    """What a 512-wide cache entry holds: channels 0..447 in FP8 per 64, the rest as they are."""
    if not n.official:
        return entry
    return torch.cat((through_fp8(entry[..., :NOPE_DIM], KV_BLOCK), entry[..., NOPE_DIM:]), dim=-1)


def hadamard_matrix(size: int) -> torch.Tensor:
    parity = torch.tensor(
        [[bin(a & b).count("1") & 1 for b in range(size)] for a in range(size)])
    return (1 - 2 * parity).float()


def hadamard(x: torch.Tensor, n: Numerics) -> torch.Tensor:
    return n.b(n.sums.hadamard(x, hadamard_matrix(x.shape[-1])))


def quantize_index(x: torch.Tensor, n: Numerics) -> torch.Tensor:
    """Rotates and quantizes an index query or key [..., 128]."""
    if not n.official:
        return x
    rotated = hadamard(x, n)
    return through_fp4(rotated) if n.index_cache == "fp4" else through_fp8(rotated, 128)


def compressed_entries(
    pooled: torch.Tensor, norm: torch.Tensor, eps: float, freq: torch.Tensor, ratio: int,
    n: Numerics,
) -> torch.Tensor:
    """Norm and rope of pooled rows; entry j stands at position ratio * j. Not yet quantized."""
    positions = torch.arange(pooled.shape[0]) * ratio
    return rope(rms_norm(n.b(pooled), norm, eps, n), rope_tables(freq, positions), n)


# --- selection of entries ------------------------------------------------------------------------


def index_weights(projected: torch.Tensor, n: Numerics) -> torch.Tensor:
    """w_h of the index heads, from the BF16 product weights_proj h [T, heads]."""
    heads = projected.shape[-1]
    return n.b(projected * torch.tensor(128**-0.5 * heads**-0.5, dtype=torch.float32))


def index_scores(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, sums: WideSums = ORDERS["wide"]
) -> torch.Tensor:
    """q [T, heads, 128], k [E, 128], w [T, heads] -> [T, E]."""
    return sums.index_scores(q, k, w)


def visible_entries(positions: torch.Tensor, entries: int, ratio: int) -> torch.Tensor:
    """[T, entries] bool: entry j is seen by token i iff i >= ratio * j + ratio - 1."""
    last = torch.arange(entries) * ratio + ratio - 1
    return positions[:, None] >= last


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of each row, best first; equal scores by lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def select_entries(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Indices [T, topk] in ascending order, padded with -1 behind."""
    tokens, entries = scores.shape
    best = top_indices(scores.masked_fill(~visible, -math.inf), min(topk, entries))
    best = torch.where(visible.gather(1, best), best, entries).sort(-1).values
    best = torch.where(best < entries, best, -1)
    pad = torch.full((tokens, topk - best.shape[1]), -1, dtype=best.dtype)
    return torch.cat((best, pad), dim=1)


def selection_mask(indices: torch.Tensor, entries: int) -> torch.Tensor:
    """[T, entries] bool from indices padded with -1."""
    mask = torch.zeros(indices.shape[0], entries + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(indices < 0, entries, indices).long(), True)
    return mask[:, :entries]


# --- attention -----------------------------------------------------------------------------------


def attend(
    q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor, n: Numerics
) -> torch.Tensor:
    """q [T, A, 512], keys [S, 512] (values too), mask [T, S], sink [A] -> [T, A, 512]."""
    return n.b(n.sums.attend(q, keys, mask, sink, HEAD_DIM**-0.5, n.b))


def sparse_attention(
    q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor, selected: torch.Tensor,
    sink: torch.Tensor, n: Numerics, tile: int = 128,
) -> torch.Tensor:
    """Causal attention over the last 128 positions and the selected entries.

    q [T, A, 512], window [T, 512] one entry a token, entries [E, 512], selected [T, E] bool.
    """
    out = torch.empty_like(q)
    for begin in range(0, q.shape[0], tile):
        end = min(begin + tile, q.shape[0])
        first = max(0, begin - WINDOW + 1)
        token = torch.arange(begin, end)[:, None]
        position = torch.arange(first, end)
        near = (position <= token) & (position > token - WINDOW)
        used = selected[begin:end].any(0)
        keys = torch.cat((window[first:end], entries[used]))
        mask = torch.cat((near, selected[begin:end][:, used]), dim=1)
        out[begin:end] = attend(q[begin:end], keys, mask, sink, n)
    return out


def grouped_output(o: torch.Tensor, wo_a: torch.Tensor, groups: int, n: Numerics) -> torch.Tensor:
    """o [T, A, 512] -> [T, groups * rank]: heads of a group, flattened, times its rows of wo_a.

    The activations are not quantized, though the weight is stored in FP8.
    """
    x = o.reshape(o.shape[0], groups, -1)
    w = wo_a.reshape(groups, -1, x.shape[-1])
    parts = [dot(x[:, g], w[g], n.sums) for g in range(groups)]
    return n.b(torch.stack(parts, 1)).flatten(1)


# --- experts -------------------------------------------------------------------------------------


def routing_scores(
    x: torch.Tensor, gate: torch.Tensor, sums: WideSums = ORDERS["wide"]
) -> torch.Tensor:
    """sqrt(softplus(gate x)), FP32 [T, experts]."""
    return sums.sqrt_softplus(dot(x, gate, sums))


def routing_weights(
    scores: torch.Tensor, ids: torch.Tensor, scaling: float, sums: WideSums = ORDERS["wide"]
) -> torch.Tensor:
    """Weights of the experts `ids` [T, k], which are summed in this order."""
    chosen = scores.gather(1, ids.long())
    return chosen / sums.add(chosen, 1) * scaling


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, n: Numerics) -> torch.Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return n.sums.silu(gate) * up


def expert(
    x: torch.Tensor, w1: Weight, w2: Weight, w3: Weight, limit: float,
    weight: torch.Tensor | None, n: Numerics,
) -> torch.Tensor:
    """One expert for its tokens; `weight` [T] is their routing weight, None for the shared one."""
    hidden = swiglu(linear(x, w1, n), linear(x, w3, n), limit, n)
    if weight is not None:
        hidden = weight[:, None] * hidden
    return linear(n.b(hidden), w2, n)
