"""The training model: DeepSeek-V4's forward pass in PyTorch, quantization-aware, for whole sequences at once.

Weights live in one dict under the official tensor names (experts of a layer stacked). `masters` are FP32; prepare()
makes from them what the forward pass multiplies with: values that the exported checkpoint holds exactly, in BF16, or in
FP32 for hyper-connections, norms and sinks. Gradients are taken with respect to the prepared weights and given to the
masters, so rounding weights needs no backward pass.

Token-wise parts see [N, ...] with N = rows * length, whatever the length, so one compiled graph serves all lengths;
attention and pooling see [rows, length, ...]. Length is a multiple of 128.
"""
import math

import torch
import torch.nn.functional as F

import quant
from quant import fake_fp4, fake_fp8, pass_through

EPS = 1e-6
HEAD, ROPE, WINDOW, STREAMS, INDEX = 512, 64, 128, 4, 128


class Options:
    """quantize: round as the checkpoint and the kernels do. select: attend only to the indexer's top k.
    breaks: names of deliberate faults, for the sensitivity table."""

    def __init__(self, quantize=True, select=True, breaks=()):
        self.quantize, self.select, self.breaks = quantize, select, frozenset(breaks)


# ---- weights ---------------------------------------------------------------------------------------------------------

def block_shapes(c, prefix, ratio, hashed):
    h, q, a = c["hidden_size"], c["q_lora_rank"], c["num_attention_heads"]
    g, r, i, e = c["o_groups"], c["o_lora_rank"], c["moe_intermediate_size"], c["n_routed_experts"]
    s = {f"hc_{k}_{n}": shape for k in ("attn", "ffn")
         for n, shape in (("fn", (24, 4 * h)), ("base", (24,)), ("scale", (3,)))}
    s |= {"attn_norm.weight": (h,), "ffn_norm.weight": (h,), "attn.wq_a.weight": (q, h), "attn.q_norm.weight": (q,),
          "attn.wq_b.weight": (a * HEAD, q), "attn.wkv.weight": (HEAD, h), "attn.kv_norm.weight": (HEAD,),
          "attn.wo_a.weight": (g * r, a // g * HEAD), "attn.wo_b.weight": (h, g * r), "attn.attn_sink": (a,)}
    parts = {"attn.compressor": HEAD} if ratio else {}
    if ratio == 4:
        parts["attn.indexer.compressor"] = INDEX
        s |= {"attn.indexer.wq_b.weight": (c["index_n_heads"] * INDEX, q),
              "attn.indexer.weights_proj.weight": (c["index_n_heads"], h)}
    for name, size in parts.items():
        wide = 2 * size if ratio == 4 else size
        s |= {f"{name}.ape": (ratio, wide), f"{name}.wkv.weight": (wide, h), f"{name}.wgate.weight": (wide, h),
              f"{name}.norm.weight": (size,)}
    s |= {"ffn.gate.weight": (e, h), "ffn.experts.w1": (e, i, h), "ffn.experts.w3": (e, i, h), "ffn.experts.w2": (e, h, i),
          "ffn.shared_experts.w1.weight": (i, h), "ffn.shared_experts.w3.weight": (i, h),
          "ffn.shared_experts.w2.weight": (h, i)}
    if not hashed:
        s["ffn.gate.bias"] = (e,)
    return {prefix + k: v for k, v in s.items()}


def shapes(c):
    h, v = c["hidden_size"], c["vocab_size"]
    head = {"norm.weight": (h,), "hc_head_fn": (4, 4 * h), "hc_head_base": (4,), "hc_head_scale": (1,)}
    s = {"embed.weight": (v, h), "head.weight": (v, h), **head}
    for n in range(c["num_hidden_layers"]):
        s |= block_shapes(c, f"layers.{n}.", c["compress_ratios"][n], n < c["num_hash_layers"])
    s |= block_shapes(c, "mtp.0.", 0, False)
    s |= {"mtp.0." + k: shape for k, shape in head.items()}
    s |= {"mtp.0.e_proj.weight": (h, h), "mtp.0.h_proj.weight": (h, h), "mtp.0.enorm.weight": (h,), "mtp.0.hnorm.weight": (h,)}
    return s


def hyper_base(place):
    """Streams start alike, so each sub-layer begins by reading mostly one of them."""
    pre = torch.full((4,), -1.5)
    pre[place % 4] = 1.5
    return torch.cat([pre, torch.zeros(4), 3.0 * torch.eye(4).flatten()])


def initialize(c, seed=0):
    generator = torch.Generator().manual_seed(seed)
    masters, place = {}, 0
    for name, shape in shapes(c).items():
        if name.endswith("norm.weight") or name.endswith("_scale"):
            value = torch.ones(shape)
        elif name.endswith("head_base"):
            value = torch.full(shape, -1.0)
        elif name.endswith("_base"):
            value, place = hyper_base(place), place + 1
        elif name.endswith(("attn_sink", "ape", "gate.bias", "wo_b.weight", "experts.w2", "w2.weight")):
            value = torch.zeros(shape)
        elif name.endswith("_fn"):
            value = 0.002 * torch.randn(shape, generator=generator)
        elif name == "embed.weight":
            value = torch.randn(shape, generator=generator)
        else:
            value = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        masters[name] = value
    for n in range(c["num_hash_layers"]):
        masters[f"layers.{n}.ffn.gate.tid2eid"] = torch.rand(
            c["vocab_size"], c["n_routed_experts"], generator=generator).argsort(-1)[:, :c["num_experts_per_tok"]].contiguous()
    return masters


FP8 = ("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight", "shared_experts.w1.weight",
       "shared_experts.w2.weight", "shared_experts.w3.weight", "e_proj.weight", "h_proj.weight", "main_proj.weight")
FP32 = ("_base", "_scale", "attn_sink", "ape", "gate.bias", "tid2eid", "confidence_head.proj.weight")


def storage(name):
    """How the checkpoint stores a tensor: fp8, fp4, f32 (hc_*_fn holds BF16 values in it) or bf16."""
    if name.endswith(FP8):
        return "fp8"
    if ".experts.w" in name:
        return "fp4"
    return "f32" if name.endswith(FP32) or name.endswith("_fn") else "bf16"


@torch.no_grad()
def prepare(masters, quantize=True):
    out = {}
    for name, value in masters.items():
        kind = storage(name)
        if kind == "fp8" and quantize:
            value = quant.fake_weight_fp8(value)
        elif kind == "fp4" and quantize:
            value = quant.fake_weight_fp4(value)
        elif name.endswith(FP32):
            value = value.clone()
        elif name.endswith("norm.weight"):
            value = value.to(torch.bfloat16).float()
        else:
            value = value.to(torch.bfloat16)
        out[name] = value
    return out


def block_weights(w, prefix):
    return {k[len(prefix):]: v for k, v in w.items() if k.startswith(prefix)}


def split_weights(w):
    """(those before attention, those after it): what one compiled graph needs, so that layers share graphs."""
    late = ("hc_ffn", "ffn", "attn.wo_")
    return ({k: v for k, v in w.items() if k.startswith(("hc_attn", "attn")) and not k.startswith(late)},
            {k: v for k, v in w.items() if k.startswith(late)})


# ---- small operators -------------------------------------------------------------------------------------------------

def rms_norm(x, weight):
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def q8(x, on):
    return pass_through(x, fake_fp8(x)) if on else x


def rotate(x, cos, sin):
    """Rope on the last 64 channels; cos and sin broadcast against [..., 32]."""
    plain, pairs = x[..., :-ROPE], x[..., -ROPE:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)


def frequencies(c, compressed):
    base = c["compress_rope_theta"] if compressed else c["rope_theta"]
    f = 1.0 / base ** (torch.arange(0, ROPE, 2, dtype=torch.float32) / ROPE)
    if not compressed:
        return f
    s = c["rope_scaling"]

    def dimension(turns):
        return ROPE * math.log(s["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(base))
    low, high = max(math.floor(dimension(s["beta_fast"])), 0), min(math.ceil(dimension(s["beta_slow"])), ROPE - 1)
    g = ((torch.arange(ROPE // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return f / s["factor"] * g + f * (1 - g)


def rope_tables(c, length, device):
    """{compressed?: (cos, sin)} of [length, 32]."""
    out = {}
    for compressed in (False, True):
        angle = torch.arange(length, dtype=torch.float32)[:, None] * frequencies(c, compressed)
        out[compressed] = (angle.cos().to(device), angle.sin().to(device))
    return out


def quantize_entry(kv):
    """What the cache keeps: FP8 per 64 on the first 448 channels, the rotary 64 in BF16."""
    return pass_through(kv, torch.cat((fake_fp8(kv[..., :-ROPE], 64), kv[..., -ROPE:]), -1))


def quantize_index(x, had):
    y = ((x @ had) * INDEX**-0.5).to(x.dtype)
    return pass_through(y, fake_fp4(y))


# ---- hyper-connections -----------------------------------------------------------------------------------------------

def balance(m, rounds):
    for _ in range(rounds):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return m


def mixing(x, fn, base, scale):
    """The raw numbers of a sub-layer: x is [N, 4, H] in BF16."""
    flat = x.flatten(1)
    size = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + EPS)
    return (flat @ fn.T).float() * size * scale + base


def hyper(x, w, kind):
    """(input of the sub-layer, post, comb). Gradients of the doubly stochastic matrix go through its last three rounds:
    scaling rows and columns by constants does not move the fixed point."""
    scale = w[f"hc_{kind}_scale"]
    scale = torch.cat((scale[:1].expand(4), scale[1:2].expand(4), scale[2:].expand(16)))
    m = mixing(x, w[f"hc_{kind}_fn"], w[f"hc_{kind}_base"], scale)
    pre = torch.sigmoid(m[:, :4]) + EPS
    post = 2 * torch.sigmoid(m[:, 4:8])
    logits = m[:, 8:].unflatten(-1, (4, 4))
    with torch.no_grad():
        start = logits.softmax(-1) + EPS
        start = balance(start / (start.sum(-2, keepdim=True) + EPS), 6)
    comb = balance(start * torch.exp(logits - logits.detach()), 3)
    return (pre[..., None] * x.float()).sum(1).to(x.dtype), post, comb


def hyper_out(x, y, post, comb):
    kept = (comb[..., None] * x.float()[:, :, None]).sum(1)
    return (post[..., None] * y.float()[:, None] + kept).to(x.dtype)


def head_weights(w):
    return {k: w[k] for k in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")}


def collapse(x, w):
    pre = torch.sigmoid(mixing(x, w["hc_head_fn"], w["hc_head_base"], w["hc_head_scale"])) + EPS
    return (pre[..., None] * x.float()).sum(1).to(x.dtype)


def hyper_head(x, w):
    return rms_norm(collapse(x, w), w["norm.weight"])


# ---- attention -------------------------------------------------------------------------------------------------------

def attention_in(x, w, cos, sin, had, on):
    """Everything before keys meet queries. x [N, 4, H]; cos, sin [N, 32] of this layer's rope."""
    h, post, comb = hyper(x, w, "attn")
    h = rms_norm(h, w["attn_norm.weight"])
    hq = q8(h, on)
    qr = rms_norm(F.linear(hq, w["attn.wq_a.weight"]), w["attn.q_norm.weight"])
    qrq = q8(qr, on)
    q = F.linear(qrq, w["attn.wq_b.weight"]).unflatten(-1, (-1, HEAD))
    q = (q.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + EPS)).to(q.dtype)
    q = rotate(q, cos[:, None], sin[:, None])
    kv = rotate(rms_norm(F.linear(hq, w["attn.wkv.weight"]), w["attn.kv_norm.weight"]), cos, sin)
    if on:
        kv = quantize_entry(kv)
    out = {"q": q, "kv": kv, "post": post, "comb": comb}
    if "attn.compressor.ape" in w:
        out["c"] = F.linear(h, w["attn.compressor.wkv.weight"])
        out["z"] = F.linear(h, w["attn.compressor.wgate.weight"])
    if "attn.indexer.wq_b.weight" in w:
        alone = h.detach()
        out["ic"] = F.linear(alone, w["attn.indexer.compressor.wkv.weight"])
        out["iz"] = F.linear(alone, w["attn.indexer.compressor.wgate.weight"])
        qi = F.linear(qrq.detach(), w["attn.indexer.wq_b.weight"]).unflatten(-1, (-1, INDEX))
        qi = rotate(qi, cos[:, None], sin[:, None])
        out["iq"] = quantize_index(qi, had) if on else qi
        heads = qi.shape[-2]
        out["iw"] = F.linear(alone, w["attn.indexer.weights_proj.weight"]) * (INDEX**-0.5 * heads**-0.5)
    return out


def pool(c, z, ape, weight, cos, sin, ratio, rows):
    """Compressed entries [rows, length / ratio, size] before quantization; cos and sin are of the full length."""
    c = c.unflatten(0, (rows, -1, ratio)).float()
    z = z.unflatten(0, (rows, -1, ratio)).float() + ape
    if ratio == 4:
        d = weight.shape[0]
        before = F.pad(c[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
        before_z = F.pad(z[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=-1e30)
        c, z = torch.cat((before, c[..., d:]), 2), torch.cat((before_z, z[..., d:]), 2)
    entry = (z.softmax(2) * c).sum(2).to(torch.bfloat16)
    n = entry.shape[1]
    return rotate(rms_norm(entry, weight), cos[: n * ratio: ratio], sin[: n * ratio: ratio])


def entries(t, w, cos, sin, had, ratio, rows, on):
    """(main entries, index keys or None)."""
    main = pool(t["c"], t["z"], w["attn.compressor.ape"], w["attn.compressor.norm.weight"], cos, sin, ratio, rows)
    main = quantize_entry(main) if on else main
    if ratio != 4:
        return main, None
    key = pool(t["ic"], t["iz"], w["attn.indexer.compressor.ape"], w["attn.indexer.compressor.norm.weight"], cos, sin, 4, rows)
    return main, quantize_index(key, had) if on else key


def index_scores(iq, iw, key):
    """[rows, length, entries] in FP32, differentiable."""
    rows = key.shape[0]
    heads = iq.shape[-2]
    dots = torch.bmm(iq.view(rows, -1, INDEX), key.transpose(1, 2)).relu()
    dots = dots.unflatten(1, (-1, heads)).float()
    return (dots * iw.view(rows, -1, heads, 1).float()).sum(2)


def visible_entries(length, count, ratio, device):
    """[length, entries]: entry j is complete at token ratio * j + ratio - 1."""
    token, entry = torch.arange(length, device=device)[:, None], torch.arange(count, device=device)
    return token >= ratio * entry + ratio - 1


def window_logits(q, kv, rows, window):
    """Logits of each token's last `window` positions, as [rows, chunks, 128 * heads, 256], masked, and their keys."""
    heads = q.shape[-2]
    keys = kv.view(rows, -1, WINDOW, HEAD)
    keys = torch.cat((F.pad(keys[:, :-1], (0, 0, 0, 0, 1, 0)), keys), 2)
    chunks = keys.shape[1]
    logits = (q.view(rows, chunks, WINDOW * heads, HEAD) @ keys.transpose(-1, -2)).float() * HEAD**-0.5
    i = torch.arange(WINDOW * heads, device=q.device)[:, None] // heads + WINDOW
    j = torch.arange(2 * WINDOW, device=q.device)
    first = torch.arange(chunks, device=q.device)[:, None, None] > 0
    allowed = (j <= i) & (j > i - window) & (first | (j >= WINDOW))
    return logits.masked_fill(~allowed, -1e30), keys


def attend(q, kv, sink, entry, allowed, rows, window=WINDOW):
    """Output [N, heads, 512]. entry [rows, E, 512] or None; allowed broadcasts to [rows, length, E]."""
    heads = q.shape[-2]
    near, keys = window_logits(q, kv, rows, window)
    s = sink.repeat(WINDOW)[:, None]
    peak = torch.maximum(near.detach().amax(-1, keepdim=True), s.detach())
    far = None
    if entry is not None:
        far = torch.bmm(q.view(rows, -1, HEAD), entry.transpose(1, 2)).float() * HEAD**-0.5
        far = far.unflatten(1, (-1, heads)).masked_fill(~allowed[:, :, None], -1e30)
        far = far.view(*near.shape[:3], -1)
        peak = torch.maximum(peak, far.detach().amax(-1, keepdim=True))
    p = torch.exp(near - peak)
    total = p.sum(-1, keepdim=True) + torch.exp(s - peak)
    out = p.to(q.dtype) @ keys
    if far is not None:
        pf = torch.exp(far - peak)
        total = total + pf.sum(-1, keepdim=True)
        out = out + torch.bmm(pf.to(q.dtype).flatten(1, 2), entry).view_as(out)
    return (out.float() / total).to(q.dtype).view(q.shape)


@torch.no_grad()
def attention_mass(q, kv, sink, entry, allowed, rows):
    """What attention over everything visible gives each entry: ([rows, length, E] summing to 1, its share of all mass)."""
    heads = q.shape[-2]
    near, _ = window_logits(q, kv, rows, WINDOW)
    far = (torch.bmm(q.view(rows, -1, HEAD), entry.transpose(1, 2)).float() * HEAD**-0.5).unflatten(1, (-1, heads))
    far = far.masked_fill(~allowed[:, :, None], -1e30)
    near = torch.logaddexp(near.logsumexp(-1), sink.repeat(WINDOW)).view(rows, -1, heads, 1)
    total = torch.logaddexp(near, far.logsumexp(-1, keepdim=True))
    mass = torch.exp(far - total).sum(2)
    share = mass.sum(-1)
    return (mass / (share[..., None] + 1e-9)).to(torch.bfloat16), share / heads


def index_loss(scores, mass, share, allowed, token_weight):
    """Cross entropy of the indexer's softmax against the attention mass, weighted by what is at stake."""
    log = scores.masked_fill(~allowed, -1e30).log_softmax(-1)
    loss = -(mass.float() * log.masked_fill(~allowed, 0)).sum(-1)
    entropy = -(mass.float() * (mass.float() + 1e-9).log()).sum(-1)
    weight = token_weight * (share + 0.02) * allowed.any(-1)
    return ((loss - entropy) * weight).sum() / (weight.sum() + 1e-6)


def choose(scores, allowed, k):
    """The indexer's selection: allowed, less what falls below the k-th best score."""
    if scores.shape[-1] <= k:
        return allowed
    scores = scores.detach().masked_fill(~allowed, -1e30)
    return allowed & (scores >= scores.topk(k, dim=-1).values[..., -1:])


# ---- experts ---------------------------------------------------------------------------------------------------------

def routing(h, w, tokens, k, scaling):
    """Dense [N, experts] weights, zero where not chosen."""
    score = F.softplus(h.float() @ w["ffn.gate.weight"].float().T).sqrt()
    if "ffn.gate.tid2eid" in w:
        chosen = w["ffn.gate.tid2eid"][tokens]
    else:
        chosen = (score.detach() + w["ffn.gate.bias"]).topk(k, dim=-1).indices
    mask = torch.zeros_like(score).scatter(1, chosen, 1.0)
    kept = score * mask
    return kept / kept.sum(-1, keepdim=True) * scaling, mask


def experts(h, w, weights, limit, on):
    """All experts at once, the shared one last with weight 1; those not chosen have weight 0 and add nothing."""
    up = torch.cat((w["ffn.experts.w3"].flatten(0, 1), w["ffn.shared_experts.w3.weight"]))
    gate = torch.cat((w["ffn.experts.w1"].flatten(0, 1), w["ffn.shared_experts.w1.weight"]))
    down = torch.cat((w["ffn.experts.w2"].transpose(1, 2).flatten(0, 1), w["ffn.shared_experts.w2.weight"].T))
    size = w["ffn.shared_experts.w1.weight"].shape[0]
    hq = q8(h, on)
    u = F.linear(hq, up).float().clamp(-limit, limit).unflatten(-1, (-1, size))
    g = F.linear(hq, gate).float().clamp_max(limit).unflatten(-1, (-1, size))
    weights = torch.cat((weights, torch.ones_like(weights[:, :1])), 1)
    t = (weights[..., None] * F.silu(g) * u).to(h.dtype).flatten(-2)
    return q8(t, on) @ down


def attention_out(x, o, w, tokens, cos, sin, groups, k, scaling, limit, on, post, comb):
    """From attention's output to the next layer's streams. Returns (streams, which experts were chosen)."""
    o = rotate(o, cos[:, None], -sin[:, None]).view(o.shape[0], groups, -1)
    wo = w["attn.wo_a.weight"].unflatten(0, (groups, -1))
    y = torch.einsum("ngi,gri->ngr", o, wo).flatten(1)
    x = hyper_out(x, F.linear(q8(y, on), w["attn.wo_b.weight"]), post, comb)
    h, post, comb = hyper(x, w, "ffn")
    h = rms_norm(h, w["ffn_norm.weight"])
    weights, mask = routing(h, w, tokens, k, scaling)
    return hyper_out(x, experts(h, w, weights, limit, on), post, comb), mask


def mtp_in(x, following, w, on):
    """The draft's streams: the target's four and the embedding of the next token."""
    e = F.linear(q8(rms_norm(w["embed"][following], w["enorm.weight"]), on), w["e_proj.weight"])
    h = F.linear(q8(rms_norm(x, w["hnorm.weight"]), on), w["h_proj.weight"])
    return e[:, None] + h


def cross_entropy(h, head, target, weight):
    """Weighted mean of the loss; the weights' sum is the divisor."""
    logits = F.linear(h, head).float()
    loss = F.cross_entropy(logits, target, reduction="none")
    return (loss * weight).sum() / (weight.sum() + 1e-6)


# ---- the whole model -------------------------------------------------------------------------------------------------

class Model:
    """Runs forward passes over prepared weights. compiled: torch.compile on the token-wise and attention parts."""

    def __init__(self, config, device, compiled=False):
        self.c, self.device = config, device
        self.had = quant.hadamard(INDEX, device).to(torch.bfloat16)
        self.tables = {}
        for f in (attention_in, entries, index_scores, attend, attention_mass, index_loss, attention_out, mtp_in,
                  hyper_head, cross_entropy):
            setattr(self, f.__name__, torch.compile(f, dynamic=False) if compiled else f)

    def rope(self, rows, length, compressed):
        if (rows, length) not in self.tables:
            t = rope_tables(self.c, length, self.device)
            self.tables[rows, length] = {k: (*v, v[0].repeat(rows, 1), v[1].repeat(rows, 1)) for k, v in t.items()}
        return self.tables[rows, length][compressed]

    def block(self, x, w, tokens, rows, ratio, options, token_weight=None):
        """(streams, chosen experts [N, E], index loss or None)."""
        c, on = self.c, options.quantize
        length = tokens.shape[0] // rows
        cos, sin, cos_n, sin_n = self.rope(rows, length, ratio > 0)
        w, late = split_weights(w)
        t = self.attention_in(x, w, cos_n, sin_n, self.had, on)
        window = WINDOW - 1 if "window" in options.breaks else WINDOW
        entry = allowed = loss = None
        if ratio:
            shift = 1 if "rope" in options.breaks else 0
            entry, key = self.entries(t, w, cos.roll(-shift, 0), sin.roll(-shift, 0), self.had, ratio, rows, on)
            seen = visible_entries(length, entry.shape[1], ratio, x.device)[None]
            allowed = seen
            if ratio == 4:
                scores = self.index_scores(t["iq"], t["iw"], key)
                if "index" in options.breaks:
                    scores = torch.rand_like(scores)
                if token_weight is not None:
                    mass, share = self.attention_mass(t["q"], t["kv"], w["attn.attn_sink"], entry, seen, rows)
                    loss = self.index_loss(scores, mass, share, seen, token_weight.view(rows, -1))
                if options.select:
                    allowed = choose(scores, seen, c["index_topk"])
        o = self.attend(t["q"], t["kv"], w["attn.attn_sink"], entry, allowed, rows, window)
        x, mask = self.attention_out(x, o, late, tokens, cos_n, sin_n, c["o_groups"], c["num_experts_per_tok"],
                                     c["routed_scaling_factor"], c["swiglu_limit"], on, t["post"], t["comb"])
        return x, mask, loss

    def streams(self, w, tokens, options, token_weight=None, keep=None):
        """(streams after the last layer [N, 4, H], chosen experts by layer, index losses). keep: {layer: None}, filled
        with the mean stream [N, H] after those layers."""
        rows = tokens.shape[0]
        flat = tokens.flatten()
        x = w["embed.weight"][flat][:, None].expand(-1, STREAMS, -1).contiguous()
        chosen, losses = {}, []
        for n in range(self.c["num_hidden_layers"]):
            x, mask, loss = self.block(x, block_weights(w, f"layers.{n}."), flat, rows, self.c["compress_ratios"][n],
                                       options, token_weight)
            chosen[f"layers.{n}."] = mask
            if keep is not None and n in keep:
                keep[n] = x.float().mean(1).to(x.dtype)
            if loss is not None:
                losses.append(loss)
            if "stream" in options.breaks:
                x = torch.cat((x[:, :3], torch.zeros_like(x[:, :1])), 1)
        return x, chosen, losses

    def draft(self, w, x, tokens, options):
        """(hidden of the MTP block [N, H] that predicts the next-but-one token, chosen experts)."""
        following = tokens.roll(-1, 1)
        m = block_weights(w, "mtp.0.")
        glue = {k: m[k] for k in ("enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight")}
        first = self.mtp_in(x, following.flatten(), {**glue, "embed": w["embed.weight"]}, options.quantize)
        y, mask, _ = self.block(first, m, following.flatten(), tokens.shape[0], 0, options)
        return self.hyper_head(y, head_weights(m)), mask

    def losses(self, w, tokens, weight, options):
        """Training losses of [rows, length] tokens; weight [rows, length] is of each token as a target."""
        shifted = F.pad(weight[:, 1:], (0, 1)).flatten()
        twice = F.pad(weight[:, 2:], (0, 2)).flatten()
        x, chosen, index = self.streams(w, tokens, options, shifted)
        main = self.cross_entropy(self.hyper_head(x, head_weights(w)), w["head.weight"], tokens.roll(-1, 1).flatten(), shifted)
        h, chosen["mtp.0."] = self.draft(w, x, tokens, options)
        draft = self.cross_entropy(h, w["head.weight"], tokens.roll(-2, 1).flatten(), twice)
        return main, draft, torch.stack(index).mean(), chosen

    def logits(self, w, tokens, options):
        x, _, _ = self.streams(w, tokens, options)
        return F.linear(self.hyper_head(x, head_weights(w)), w["head.weight"]).unflatten(0, tokens.shape), x
