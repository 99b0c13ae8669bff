"""Quantization as the official checkpoints and kernels do it: FP8 e4m3 and FP4 e2m1 with power-of-two scales.

pass_through() makes any of these a quantization-aware pass: the value is quantized, the gradient is not.
"""

import torch


def power_of_two_at_least(x):
    """The smallest power of two >= x, by exponent bits; x is positive FP32 and normal."""
    return ((x.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def pass_through(x, quantized):
    return x + (quantized - x).detach()


def fp8_scale(peak):
    return power_of_two_at_least(peak.clamp_min(1e-4) * torch.tensor(1 / 448, dtype=torch.float32, device=peak.device))


def fp4_scale(peak):
    return power_of_two_at_least(peak.clamp_min(6 * 2.0**-126)
                                 * torch.tensor(1 / 6, dtype=torch.float32, device=peak.device))


def round_fp8(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def round_fp4(x):
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign; ties to the even code."""
    size = x.abs().clamp_max(6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def fake_fp8(x, block=128):
    """Activations: a scale per `block` values of the last axis."""
    parts = x.unflatten(-1, (-1, block)).float()
    scale = fp8_scale(parts.abs().amax(-1, keepdim=True))
    return (round_fp8(parts / scale).float() * scale).flatten(-2).to(x.dtype)


def fake_fp4(x):
    """Index queries and keys: a scale per 32 values of the last axis."""
    parts = x.unflatten(-1, (-1, 32)).float()
    scale = fp4_scale(parts.abs().amax(-1, keepdim=True))
    return (round_fp4(parts / scale) * scale).flatten(-2).to(x.dtype)


def weight_fp8(w):
    """(values, scale): FP8 with a scale per 128 x 128. The last two axes are rows and columns."""
    tiles = w.float().unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))  # [rows/128, 128, columns/128, 128]
    scale = fp8_scale(tiles.abs().amax((-3, -1), keepdim=True))
    return round_fp8(tiles / scale).flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2)


def fake_weight_fp8(w):
    q, scale = weight_fp8(w)
    spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return (q.float() * spread).to(torch.bfloat16)


def weight_fp4(w):
    """(values, scale): FP4 with a scale per row and 32 columns."""
    parts = w.float().unflatten(-1, (-1, 32))
    scale = fp4_scale(parts.abs().amax(-1, keepdim=True))
    return round_fp4(parts / scale).flatten(-2), scale.squeeze(-1)


def fake_weight_fp4(w):
    q, scale = weight_fp4(w)
    return (q * scale.repeat_interleave(32, -1)).to(torch.bfloat16)


def hadamard(size, device):
    index = torch.arange(size)
    bits = torch.tensor([[bin(int(a & b)).count("1") & 1 for b in index] for a in index])
    return (1.0 - 2.0 * bits).to(device)


def pack_fp4(q):
    """int8 bytes: the low nibble is the even column; codes 0..7 are the sizes, bit 3 the sign."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.searchsorted(sizes, q.abs()) + 8 * torch.signbit(q)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8).view(torch.int8)
