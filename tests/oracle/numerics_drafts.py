"""The draft models, MTP and DSpark, on top of numerics_model.Model.

Both attend over a window of at most 128 cached entries of their own plus the entries of this call;
they differ in what they cache and in the mask.
"""

from __future__ import annotations

import torch

import numerics as ops
from numerics import HEAD_DIM, STREAMS, WINDOW
from numerics_model import Model


def draft_block(model: Model, streams, name, tokens, positions, past, causal):
    """One block with ratio 0. `past` [P, 512] holds positions 0..P-1; returns streams, entries.

    Causal: every query sees the 128 positions that end with its own. Else (DSpark): the last 128
    past entries and all entries of this call, for every query.
    """
    mix, h = model.enter(streams, name, "attn")
    tables = ops.rope_tables(model.freq(0), positions)
    _, q = model.query(h, name + ".attn", tables)
    own = model.window_entry(h, name + ".attn", tables)
    first = max(0, past.shape[0] - WINDOW)
    keys = torch.cat((past[first:], own))
    key_positions = torch.cat((torch.arange(first, past.shape[0]), positions))
    distance = positions[:, None] - key_positions
    mask = (distance >= 0) & (distance < WINDOW) if causal else torch.ones_like(distance).bool()
    o = ops.attend(q, keys, mask, model.values(name + ".attn.attn_sink"), model.n)
    y = model.attention_output(o, name + ".attn", tables)
    streams, _ = model.feed_forward(ops.hc_scatter(y, mix, streams, model.n), name, tokens)
    return streams, own


class Mtp:
    """Entry p takes the target's streams at position p and token p + 1, and predicts p + 2."""

    def __init__(self, model: Model):
        self.model = model
        self.window = torch.zeros(0, HEAD_DIM)

    def extend(self, streams: torch.Tensor, next_tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends T entries: streams [T, 4, H], next_tokens [T] -> logits [T, vocab], streams.

        To draft further, call again with the last returned streams and the drafted token; to take
        that back, shorten `window`.
        """
        model, n = self.model, self.model.n
        tokens = torch.as_tensor(next_tokens, dtype=torch.int64)
        positions = torch.arange(len(tokens)) + self.window.shape[0]
        e = model.linear(model.norm(model.embed(tokens), "mtp.0.enorm"), "mtp.0.e_proj")
        h = model.linear(model.norm(streams, "mtp.0.hnorm"), "mtp.0.h_proj")
        out, own = draft_block(
            model, n.b(e[:, None] + h), "mtp.0", tokens, positions, self.window, causal=True)
        self.window = torch.cat((self.window, own))
        return model.logits(model.collapse(out, "mtp.0."), "mtp.0."), out


class DSpark:
    """Drafts a block at once from what the target's layers held; a Markov head chains it."""

    def __init__(self, model: Model):
        config = model.config
        self.model = model
        self.targets = config["dspark_target_layer_ids"]
        self.block = config["dspark_block_size"]
        self.noise = config["dspark_noise_token_id"]
        self.stages = len(config["compress_ratios"]) - config["num_hidden_layers"]
        self.windows = [torch.zeros(0, HEAD_DIM) for _ in range(self.stages)]

    def extend(self, after: list[torch.Tensor]) -> None:
        """Appends T positions; `after` are the target's streams after each layer."""
        model = self.model
        means = [model.n.b(after[layer].double().mean(1).float()) for layer in self.targets]
        main = model.linear(torch.cat(means, dim=1), "mtp.0.main_proj")
        main = model.norm(main, "mtp.0.main_norm")
        positions = torch.arange(main.shape[0]) + self.windows[0].shape[0]
        tables = ops.rope_tables(model.freq(0), positions)
        for stage in range(self.stages):
            own = model.window_entry(main, f"mtp.{stage}.attn", tables)
            self.windows[stage] = torch.cat((self.windows[stage], own))

    def draft(self, token: int, sample=torch.argmax):
        """After `extend` up to position p, token t_{p+1}: ids, logits [B, vocab], confidence."""
        model, last = self.model, f"mtp.{self.stages - 1}."
        tokens = torch.tensor([token] + [self.noise] * (self.block - 1))
        positions = torch.arange(self.block) + self.windows[0].shape[0]
        streams = model.embed(tokens)[:, None].expand(-1, STREAMS, -1)
        for stage in range(self.stages):
            streams, _ = draft_block(model, streams, f"mtp.{stage}", tokens, positions,
                                     self.windows[stage], causal=False)
        y = model.collapse(streams, last)
        return self.chain(y, model.logits(y, last), token, sample)

    def chain(self, y, base, token, sample):
        model, last = self.model, f"mtp.{self.stages - 1}."
        markov = model.values(last + "markov_head.markov_w1.weight")
        spread = model.values(last + "markov_head.markov_w2.weight")
        proj = model.values(last + "confidence_head.proj.weight")
        ids, logits, confidence = [], [], []
        for i in range(self.block):
            embedded = markov[token]
            row = base[i] + ops.dot(embedded[None], spread)[0]
            confidence.append(torch.sigmoid(ops.dot(torch.cat((y[i], embedded))[None], proj)[0, 0]))
            token = int(sample(row))
            ids.append(token)
            logits.append(row)
        return ids, torch.stack(logits), torch.stack(confidence)
