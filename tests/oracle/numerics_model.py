"""The whole model from the operators of numerics.py: a token list in, logits and choices out.

    model = Model(Checkpoint(folder), Numerics("official"))
    logits, choices = model.forward(tokens)

Routing and index selection can be forced to another implementation's, because one unit in the last
place may flip a choice and everything behind it. What this side would have chosen freely on the
same inputs is then reported with the score gap, so that a wrong choice is not excused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

import numerics as ops
from checkpoint import Checkpoint
from numerics import HEAD_DIM, STREAMS, Mix, Numerics, Weight


@dataclass
class Choice:
    """The selection of one layer: used [T, k], what was free to choose, and score gaps [T].

    gap: where used and free are the same set, the free choice's lead over the next candidate
    (infinite if nothing else could be chosen); else how much the best rejected candidate beats
    the worst forced one. `flipped` [T] tells the two apart.
    """

    used: torch.Tensor
    free: torch.Tensor
    gap: torch.Tensor
    flipped: torch.Tensor


@dataclass
class Choices:
    routing: dict[int, Choice] = field(default_factory=dict)
    index: dict[int, Choice] = field(default_factory=dict)


def judge(scores: torch.Tensor, used: torch.Tensor, free: torch.Tensor) -> Choice:
    """Compares two selections of columns of `scores` [T, N] (-inf: not a candidate)."""
    tokens, columns = scores.shape
    if columns == 0:
        return Choice(used, free, torch.full((tokens,), math.inf), torch.zeros(tokens).bool())
    taken, wanted = (ops.selection_mask(x, columns) for x in (used, free))
    flipped = (taken != wanted).any(1)
    lowest = scores.masked_fill(~wanted, math.inf).amin(1)
    highest = scores.masked_fill(wanted, -math.inf).amax(1)
    missed = scores.masked_fill(~(wanted & ~taken), -math.inf).amax(1)
    forced = scores.masked_fill(~(taken & ~wanted), math.inf).amin(1)
    gap = torch.where(flipped, missed - forced, lowest - highest)
    return Choice(used, free, gap, flipped)


def best_first(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same ids [T, k] in the order in which they would be chosen."""
    ids = ids.sort(-1).values
    order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


class Model:
    def __init__(self, checkpoint: Checkpoint, numerics: Numerics):
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.n = numerics
        self.eps = self.config["rms_norm_eps"]
        self.plain_freq = ops.rope_frequencies(self.config["rope_theta"], None)
        self.compress_freq = ops.rope_frequencies(
            self.config["compress_rope_theta"], self.config["rope_scaling"])
        self._values: dict[str, torch.Tensor] = {}

    def values(self, name: str) -> torch.Tensor:
        if name not in self._values:
            self._values[name] = self.checkpoint.values(name)
        return self._values[name]

    def weight(self, name: str) -> Weight:
        name += ".weight"
        return Weight(self.values(name), self.checkpoint.quantized(name))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return ops.rms_norm(x, self.values(name + ".weight"), self.eps, self.n)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return ops.linear(x, self.weight(name), self.n)

    def freq(self, ratio: int) -> torch.Tensor:
        return self.compress_freq if ratio else self.plain_freq

    # --- attention ---

    def query(self, h, name, tables) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed low-rank query [T, L] and the rotated heads [T, A, 512]."""
        low = self.norm(self.linear(h, name + ".wq_a"), name + ".q_norm")
        q = self.linear(low, name + ".wq_b").unflatten(1, (-1, HEAD_DIM))
        return low, ops.rope(ops.head_norm(q, self.eps, self.n), tables, self.n)

    def window_entry(self, h, name, tables) -> torch.Tensor:
        kv = self.norm(self.linear(h, name + ".wkv"), name + ".kv_norm")
        return ops.quantize_kv(ops.rope(kv, tables, self.n), self.n)

    def compress(self, h: torch.Tensor, name: str, ratio: int) -> torch.Tensor:
        content = ops.dot(h, self.values(name + ".wkv.weight"), self.n.sums)
        gate = ops.dot(h, self.values(name + ".wgate.weight"), self.n.sums)
        pooled = ops.compressor_pool(content, gate, self.values(name + ".ape"), ratio, self.n)
        return ops.compressed_entries(
            pooled, self.values(name + ".norm.weight"), self.eps, self.freq(ratio), ratio, self.n)

    def score_entries(self, h, low, name, tables) -> torch.Tensor:
        """Index scores [T, E], not yet masked."""
        q = self.linear(low, name + ".wq_b").unflatten(1, (-1, self.config["index_head_dim"]))
        q = ops.quantize_index(ops.rope(q, tables, self.n), self.n)
        k = ops.quantize_index(self.compress(h, name + ".compressor", 4), self.n)
        w = ops.index_weights(self.linear(h, name + ".weights_proj"), self.n)
        return ops.index_scores(q, k, w, self.n.sums)

    def select(self, h, low, name, tables, positions, forced) -> Choice:
        scores = self.score_entries(h, low, name + ".indexer", tables)
        visible = ops.visible_entries(positions, scores.shape[1], 4)
        free = ops.select_entries(scores, visible, self.config["index_topk"])
        used = free if forced is None else forced
        return judge(scores.masked_fill(~visible, -math.inf), used, free)

    def attention_output(self, o, name, tables) -> torch.Tensor:
        o = ops.rope(o, tables, self.n, inverse=True)
        wo_a = self.values(name + ".wo_a.weight")
        return self.linear(
            ops.grouped_output(o, wo_a, self.config["o_groups"], self.n), name + ".wo_b")

    def attention(self, h, name, ratio, forced) -> tuple[torch.Tensor, Choice | None]:
        positions = torch.arange(h.shape[0])
        tables = ops.rope_tables(self.freq(ratio), positions)
        low, q = self.query(h, name, tables)
        window = self.window_entry(h, name, tables)
        entries, selected, choice = torch.zeros(0, HEAD_DIM), None, None
        if ratio:
            entries = ops.quantize_kv(self.compress(h, name + ".compressor", ratio), self.n)
            selected = ops.visible_entries(positions, entries.shape[0], ratio)
        if ratio == 4:
            choice = self.select(h, low, name, tables, positions, forced)
            selected = ops.selection_mask(choice.used, entries.shape[0])
        if selected is None:
            selected = torch.zeros(h.shape[0], 0, dtype=torch.bool)
        o = ops.sparse_attention(
            q, window, entries, selected, self.values(name + ".attn_sink"), self.n)
        return self.attention_output(o, name, tables), choice

    # --- experts ---

    def route(self, x, name, tokens, forced) -> tuple[torch.Tensor, torch.Tensor, Choice | None]:
        """Expert ids [T, k], their weights, and the choice where there was one."""
        k = self.config["num_experts_per_tok"]
        scores = ops.routing_scores(x, self.values(name + ".gate.weight"), self.n.sums)
        table = name + ".gate.tid2eid"
        if table in self.checkpoint:
            ids, choice = self.values(table)[tokens], None
        else:
            biased = scores + self.values(name + ".gate.bias")
            free = ops.top_indices(biased, k)
            ids = free if forced is None else best_first(biased, forced.long())
            choice = judge(biased, ids, free)
        weights = ops.routing_weights(
            scores, ids, self.config["routed_scaling_factor"], self.n.sums)
        return ids, weights, choice

    def expert(self, x, name, weight) -> torch.Tensor:
        w1, w2, w3 = (self.weight(f"{name}.{w}") for w in ("w1", "w2", "w3"))
        return ops.expert(x, w1, w2, w3, self.config["swiglu_limit"], weight, self.n)

    def experts(self, x, name, tokens, forced) -> tuple[torch.Tensor, Choice | None]:
        ids, weights, choice = self.route(x, name, tokens, forced)
        y = torch.zeros_like(x)
        for e in range(self.config["n_routed_experts"]):
            token, place = torch.where(ids == e)
            if len(token):
                y[token] += self.expert(x[token], f"{name}.experts.{e}", weights[token, place])
        y += self.expert(x, name + ".shared_experts", None)
        return self.n.b(y), choice

    # --- blocks ---

    def mix(self, streams: torch.Tensor, name: str) -> Mix:
        fn, base, scale = (self.values(name + part) for part in ("_fn", "_base", "_scale"))
        c = self.config
        return ops.hc_mix(
            streams, fn, base, scale, self.eps, c["hc_eps"], c["hc_sinkhorn_iters"], self.n)

    def enter(self, streams, name, part) -> tuple[Mix, torch.Tensor]:
        mix = self.mix(streams, f"{name}.hc_{part}")
        return mix, self.norm(ops.hc_gather(streams, mix.pre, self.n), f"{name}.{part}_norm")

    def block(self, streams, name, ratio, tokens, force_routing=None, force_index=None):
        mix, h = self.enter(streams, name, "attn")
        y, index = self.attention(h, name + ".attn", ratio, force_index)
        streams = ops.hc_scatter(y, mix, streams, self.n)
        streams, routing = self.feed_forward(streams, name, tokens, force_routing)
        return streams, routing, index

    def feed_forward(self, streams, name, tokens, forced=None):
        mix, h = self.enter(streams, name, "ffn")
        y, routing = self.experts(h, name + ".ffn", tokens, forced)
        return ops.hc_scatter(y, mix, streams, self.n), routing

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.values("embed.weight")[tokens]

    def collapse(self, streams: torch.Tensor, prefix: str = "") -> torch.Tensor:
        """The streams as one vector, before the final norm."""
        fn, base, scale = (self.values(f"{prefix}hc_head_{p}") for p in ("fn", "base", "scale"))
        return ops.hc_head(streams, fn, base, scale, self.eps, self.config["hc_eps"], self.n)

    def logits(self, x: torch.Tensor, prefix: str = "") -> torch.Tensor:
        return ops.dot(self.norm(x, prefix + "norm"), self.values("head.weight"), self.n.sums)

    def forward_streams(self, tokens, force_routing=None, force_index=None, anchors=None):
        """The streams [T, 4, H] after every layer (a list), and the choices.

        `anchors` (by layer) are another implementation's streams after that layer: the next layer
        then starts from those, so that every layer is judged on identical inputs.
        """
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        force_routing, force_index = force_routing or {}, force_index or {}
        anchors = anchors or {}
        streams = self.embed(tokens)[:, None].expand(-1, STREAMS, -1)
        after, choices = [], Choices()
        for layer in range(self.config["num_hidden_layers"]):
            streams, routing, index = self.block(
                streams, f"layers.{layer}", self.config["compress_ratios"][layer], tokens,
                force_routing.get(layer), force_index.get(layer))
            after.append(streams)
            streams = anchors.get(layer, streams)
            if routing is not None:
                choices.routing[layer] = routing
            if index is not None:
                choices.index[layer] = index
        return after, choices

    def forward(self, tokens, force_routing=None, force_index=None):
        """Logits [T, vocab] FP32 and the choices. Forced ids by layer: [T, k], index padded -1."""
        after, choices = self.forward_streams(tokens, force_routing, force_index)
        return self.logits(self.collapse(after[-1])), choices

    def replay(self, tokens, force_routing, force_index, anchors):
        """Another implementation's run layer by layer: logits, choices, streams after each."""
        after, choices = self.forward_streams(tokens, force_routing, force_index, anchors)
        return self.logits(self.collapse(after[-1])), choices, after


def forward(folder, tokens, *, numerics="official", force_routing=None, force_index=None):
    """One call without keeping the weights."""
    model = Model(Checkpoint(folder), Numerics(numerics))
    return model.forward(tokens, force_routing, force_index)
