"""Muon for matrices, Adam for the rest, over the masters' dict; both in FP32 and without weight decay on vectors."""
import torch

# Adam's rate by name ending, first match wins; a matrix that matches none belongs to Muon.
ADAM_RATES = (("embed.weight", 0.02), ("head.weight", 0.004), ("markov_w1.weight", 0.005), ("markov_w2.weight", 0.005),
              ("confidence_head.proj.weight", 1e-3), ("_fn", 1e-4), ("ffn.gate.weight", 1e-3),
              ("weights_proj.weight", 1e-3), ("ape", 0.01), ("attn_sink", 0.01), ("_base", 0.005), ("_scale", 0.002),
              ("norm.weight", 0.005))
MUON_RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.02
BALANCE = 0.001  # step of the experts' biases


def orthogonalize(g):
    """Newton-Schulz towards the nearest orthogonal matrix, batched over the first axis."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if flip else x).float()


def adam_rate(name):
    return next((rate for end, rate in ADAM_RATES if name.endswith(end)), None)


class Optimizer:
    def __init__(self, masters):
        trained = [n for n in masters if not n.endswith(("tid2eid", "gate.bias"))]
        self.adam = {n: adam_rate(n) for n in trained if adam_rate(n) is not None}
        self.muon = {}  # (rows, columns) -> names
        for n in trained:
            if n not in self.adam:
                self.muon.setdefault(tuple(masters[n].shape[-2:]), []).append(n)
        self.state = {n: torch.zeros_like(masters[n]) for n in trained}
        self.square = {n: torch.zeros_like(masters[n]) for n in self.adam}
        self.steps = 0

    @torch.no_grad()
    def step(self, masters, grads, rate):
        """rate: the schedule's factor on every learning rate."""
        self.steps += 1
        names = list(self.adam)
        g = [grads[n].float() for n in names]
        first, second = [self.state[n] for n in names], [self.square[n] for n in names]
        torch._foreach_lerp_(first, g, 0.1)
        torch._foreach_mul_(second, 0.95)
        torch._foreach_addcmul_(second, g, g, 0.05)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1 - 0.95**self.steps) ** 0.5)
        torch._foreach_add_(root, 1e-10)
        update = torch._foreach_div(first, root)
        torch._foreach_mul_(update, [-rate * self.adam[n] / (1 - 0.9**self.steps) for n in names])
        torch._foreach_add_([masters[n] for n in names], update)
        for (rows, columns), names in self.muon.items():
            g = torch.cat([grads[n].float().view(-1, rows, columns) for n in names])
            m = torch.cat([self.state[n].view(-1, rows, columns) for n in names]).lerp_(g, 1 - MOMENTUM)
            update = orthogonalize(g.lerp(m, MOMENTUM)) * max(1, rows / columns) ** 0.5
            at = 0
            for n in names:
                count = masters[n].numel() // (rows * columns)
                self.state[n].copy_(m[at:at + count].view_as(self.state[n]))
                masters[n].mul_(1 - rate * MUON_RATE * DECAY).sub_(
                    update[at:at + count].view_as(masters[n]), alpha=rate * MUON_RATE)
                at += count

    def state_dict(self):
        return {"state": self.state, "square": self.square, "steps": self.steps}

    def load_state_dict(self, saved):
        self.state, self.square, self.steps = saved["state"], saved["square"], saved["steps"]


@torch.no_grad()
def balance(masters, chosen):
    """Moves each expert's bias against its load; chosen: {block prefix: [N, experts] of 0 and 1}."""
    for prefix, mask in chosen.items():
        bias = masters.get(prefix + "ffn.gate.bias")
        if bias is not None:
            load = mask.sum(0)
            bias += BALANCE * torch.sign(load.mean() - load)
