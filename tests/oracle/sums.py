"""The orders in which sums may be taken, and the functions whose rounding is part of an order.

`WideSums` takes every sum in FP64 and rounds once: it contributes no error of its own to a
comparison. `BlockSums` takes products in FP32 in blocks: as right, in another order, it shows how far
two correct implementations are apart. `CanonicalSums` takes each sum in the order that
docs/numerics.md fixes, in FP32: what then still differs from the binary is a mistake.
Tensors are FP32 unless a name says otherwise; T tokens, K the summed length.
"""

from __future__ import annotations

import math

import torch

LANES, BLOCK = 16, 32


class WideSums:
    def dot(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [..., K] times w [N, K] transposed."""
        return (x.double() @ w.double().transpose(-1, -2)).float()

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().mean(-1, keepdim=True).float()

    def mean_square(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().square().mean(-1, keepdim=True).float()

    def add(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A sum of few values, kept as a dimension of size 1."""
        return x.sum(dim, keepdim=True)

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    def sqrt_softplus(self, logits: torch.Tensor) -> torch.Tensor:
        wide = logits.double()
        return (wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))).sqrt().float()

    def scatter(self, y, post, comb, streams) -> torch.Tensor:
        """post_k y + sum_j comb[j][k] x_j: y [T, H], post [T, 4], comb [T, 4, 4], streams [T, 4, H]."""
        kept = torch.einsum("tjk,tjh->tkh", comb.double(), streams.double())
        return (post[..., None].double() * y[:, None].double() + kept).float()

    def pool(self, gate: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """Softmax of gate [E, rows, width] over the rows, times content: [E, width]."""
        weights = torch.softmax(gate.double(), dim=1)
        return (weights * content.double()).sum(1).float()

    def hadamard(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return (self.dot(x, matrix).double() * x.shape[-1] ** -0.5).float()

    def index_scores(self, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = torch.relu(torch.einsum("thd,ed->the", q.double(), k.double()))
        return torch.einsum("the,th->te", products, w.double()).float()

    def attend(self, q, keys, mask, sink, scale: float, rounded) -> torch.Tensor:
        """q [T, A, D], keys [S, D], mask [T, S], sink [A] -> [T, A, D]; `rounded` is b()."""
        scores = (torch.einsum("tad,sd->tas", q.double(), keys.double()) * scale).float()
        scores = scores.masked_fill(~mask[:, None], -math.inf)
        top = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - top)
        total = p.double().sum(-1, keepdim=True) + torch.exp(sink[:, None] - top).double()
        return (torch.einsum("tas,sd->tad", rounded(p).double(), keys.double()) / total).float()


class BlockSums(WideSums):
    def dot(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(BLOCK, -1), w.split(BLOCK, -1))
        return sum(a @ b.transpose(-1, -2) for a, b in parts)


def is_bf16(x: torch.Tensor) -> bool:
    return torch.equal(x.to(torch.bfloat16).float(), x)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Rounded correctly, which torch's own of FP32 is not on every processor."""
    return x.double().sqrt().float()


def tree(lanes: torch.Tensor) -> torch.Tensor:
    """[16, ...] -> [...]: the fixed order in which the lanes are added."""
    half = LANES // 2
    while half:
        lanes = lanes[:half] + lanes[half : 2 * half]
        half //= 2
    return lanes[0]


def by_lane(x: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [K / 16, 16, N], K padded with zeros."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % LANES))
    return x.unflatten(1, (-1, LANES)).permute(1, 2, 0).contiguous()


class CanonicalSums(WideSums):
    TILE = 1 << 18  # lanes of one step, to stay in the cache

    def dot(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # A product of two BF16 values is exact in FP32, so that adding it is a fused multiply-add.
        step = self.add_product if is_bf16(rows) and is_bf16(w) else self.fused
        tile, w = max(1, self.TILE // (LANES * max(len(w), 1))), by_lane(w)
        out = [self.dot_rows(by_lane(part), w, step) for part in rows.split(tile)]
        return torch.cat(out).reshape(*x.shape[:-1], w.shape[2])

    @staticmethod
    def dot_rows(x, w, step) -> torch.Tensor:
        lanes = torch.zeros(LANES, x.shape[2], w.shape[2])
        for a, b in zip(x, w):
            step(lanes, a[:, :, None], b[:, None])
        return tree(lanes)

    @staticmethod
    def add_product(lanes, a, b) -> None:
        lanes.addcmul_(a, b)

    @staticmethod
    def fused(lanes, a, b) -> None:
        lanes.copy_(torch.addcmul(lanes.double(), a.double(), b.double()))

    def lane_sum(self, x: torch.Tensor) -> torch.Tensor:
        lanes = torch.zeros(LANES, x.shape[:-1].numel())
        for part in by_lane(x.reshape(-1, x.shape[-1])):
            lanes = lanes + part
        return tree(lanes).reshape(*x.shape[:-1], 1)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.lane_sum(x) / x.shape[-1]

    def mean_square(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean(x * x)

    def add(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        first, *rest = x.split(1, dim)
        for part in rest:
            first = first + part
        return first

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        """2^(k / 32) times a cubic of the rest, in FP64, rounded once."""
        wide = x.double()
        k = torch.round(wide * (0x171547652B82FE * 2.0**-52 * 32))
        r = torch.nan_to_num(wide * (0x171547652B82FE * 2.0**-52 * 32) - k)
        c0 = float.fromhex("0x1.c6af84b912394p-5") / 32**3
        c1 = float.fromhex("0x1.ebfce50fac4f3p-3") / 32**2
        c2 = float.fromhex("0x1.62e42ff0c52d6p-1") / 32
        y = (c0 * r + c1) * (r * r) + (c2 * r + 1)
        return (y * torch.exp2(k / 32)).float()

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + self.exp(-x))

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + self.exp(-x))

    def sqrt_softplus(self, logits: torch.Tensor) -> torch.Tensor:
        wide = logits.double()
        softplus = (wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))).float()
        return sqrt(softplus)

    def scatter(self, y, post, comb, streams) -> torch.Tensor:
        mixed = self.add(comb[..., None] * streams[:, :, None], 1)[:, 0]
        return post[..., None] * y[:, None] + mixed

    def pool(self, gate: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        return self.running_pool(gate, content) if gate.shape[1] == 128 else (
            self.row_pool(gate, content))

    def row_pool(self, gate, content) -> torch.Tensor:
        p = self.exp(gate - gate.amax(1, keepdim=True))
        return (self.add(p * content, 1) / self.add(p, 1))[:, 0]

    def running_pool(self, gate, content) -> torch.Tensor:
        m = torch.full_like(gate[:, 0], -math.inf)
        total, acc = torch.zeros_like(m), torch.zeros_like(m)
        for z, c in zip(gate.unbind(1), content.unbind(1)):
            e = self.exp(-(z - m).abs())
            old, new = torch.where(z > m, e, 1), torch.where(z > m, 1, e)
            m = torch.maximum(m, z)
            total, acc = total * old + new, acc * old + new * c
        return acc / total

    def hadamard(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        size, half = x.shape[-1], 1
        while half < size:
            a, b = x.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
            x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
            half *= 2
        return x * (1 / sqrt(torch.tensor(float(size))))

    def index_scores(self, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = torch.relu(self.dot(q, k)) * w[..., None]
        return self.add(products, 1)[:, 0]

    def attend(self, q, keys, mask, sink, scale: float, rounded) -> torch.Tensor:
        scores = self.dot(q, keys) * torch.tensor(scale, dtype=torch.float32)
        scores = scores.masked_fill(~mask[:, None], -math.inf)
        top = scores.amax(-1, keepdim=True)
        p = self.exp(scores - top)
        total = self.add(p, -1) + self.exp(sink[:, None] - top)
        p, out = rounded(p), torch.zeros_like(q)
        # The same fused multiply-adds as above: p and the keys are BF16 values.
        for weight, key in zip(p.split(1, -1), keys):
            out.addcmul_(weight, key)
        return out / total


ORDERS = {"wide": WideSums(), "blocks": BlockSums(), "canonical": CanonicalSums()}
