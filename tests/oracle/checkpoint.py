"""Checkpoints in the official DeepSeek-V4 format: reading with exact dequantization.

A checkpoint is a folder with config.json and either model.safetensors or shards listed by
model.safetensors.index.json. Quantized tensors come in pairs `X.weight`, `X.scale`:
  FP8   F8_E4M3 [N, K]   with F8_E8M0 [ceil(N/128), ceil(K/128)]
  FP4   I8 [N, K/2]      with F8_E8M0 [N, K/32]; the low nibble is the even column
Everything else is BF16, F32 or I64. Values leave this module as FP32 and are exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

FP8_BLOCK = 128
FP4_BLOCK = 32
FP4_VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """ue8m0 bytes as FP32 powers of two, 2^(byte - 127). Byte 255 is invalid."""
    exponent = scale.view(torch.uint8).to(torch.int32)
    if bool((exponent == 255).any()):
        raise ValueError("a ue8m0 scale holds 255, which is not a number")
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent - 127).float()


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, cols = weight.shape
    expected = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"FP8 scale has shape {tuple(scale.shape)}, expected {expected}")
    spread = scale_values(scale).repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight.float() * spread[:rows, :cols]


def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, half = packed.shape
    expected = (rows, half * 2 // FP4_BLOCK)
    if tuple(scale.shape) != expected:
        raise ValueError(f"FP4 scale has shape {tuple(scale.shape)}, expected {expected}")
    codes = packed.view(torch.uint8).to(torch.int64)
    values = torch.stack((FP4_VALUES[codes & 15], FP4_VALUES[codes >> 4]), dim=-1)
    return values.reshape(rows, half * 2) * scale_values(scale).repeat_interleave(FP4_BLOCK, 1)


class Checkpoint:
    """A read-only view of one folder. Tensors are read when asked for."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config: dict = json.loads((self.folder / "config.json").read_text())
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, object] = {}
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            for name, shard in json.loads(index.read_text())["weight_map"].items():
                self._file_of[name] = self.folder / shard
        else:
            single = self.folder / "model.safetensors"
            for name in self._handle(single).keys():
                self._file_of[name] = single

    def _handle(self, path: Path):
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def raw(self, name: str) -> torch.Tensor:
        """The tensor with its stored dtype."""
        return self._handle(self._file_of[name]).get_tensor(name)

    def values(self, name: str) -> torch.Tensor:
        """The tensor as exact FP32 (I64 stays I64). `name` includes `.weight` where it has one."""
        tensor = self.raw(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantize_fp8(tensor, self.raw(name.removesuffix("weight") + "scale"))
        if tensor.dtype == torch.int8:
            return dequantize_fp4(tensor, self.raw(name.removesuffix("weight") + "scale"))
        return tensor if tensor.dtype == torch.int64 else tensor.float()

    def quantized(self, name: str) -> bool:
        return self.raw(name).dtype in (torch.float8_e4m3fn, torch.int8)
