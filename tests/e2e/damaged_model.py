"""Copies of a model with one thing wrong on disk, which a server must load without complaint and answer worse with."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

FP8_NAN = (0x7F, 0xFF)


class Checkpoint:
    """The tensors of one model.safetensors as bytes that can be changed."""

    def __init__(self, path: Path):
        self.path, self.data = path, bytearray(path.read_bytes())
        self.begin = 8 + struct.unpack_from("<Q", self.data)[0]
        header = json.loads(self.data[8:self.begin])
        self.ranges = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}

    def change(self, suffix: str, edit: Callable[[bytes], bytes]) -> None:
        """Every tensor of the target whose name ends so."""
        names = [n for n in self.ranges if n.endswith(suffix) and not n.startswith("mtp.")]
        assert names, f"no tensor is called *{suffix}"
        for name in names:
            first, last = (self.begin + at for at in self.ranges[name])
            self.data[first:last] = edit(bytes(self.data[first:last]))
        assert self.begin + max(last for _, last in self.ranges.values()) == len(self.data)


def random_index(checkpoint: Checkpoint) -> None:
    """The indexer's queries are noise, so what it picks has nothing to do with the question."""
    rng = random.Random(1)

    def noise(old: bytes) -> bytes:
        return bytes(code - 1 if code in FP8_NAN else code for code in rng.randbytes(len(old)))
    checkpoint.change("attn.indexer.wq_b.weight", noise)


def dropped_stream(checkpoint: Checkpoint) -> None:
    """No sub-layer reads the last hyper-connection stream: the sigmoid of its share is zero."""
    for suffix in ["hc_attn_base", "hc_ffn_base", "hc_head_base"]:
        checkpoint.change(suffix, lambda old: old[:12] + struct.pack("<f", -1e4) + old[16:])


def doubled_expert(checkpoint: Checkpoint) -> None:
    """What expert 0 of every layer adds counts twice: one more in each exponent of its last matrix's scales."""
    checkpoint.change("ffn.experts.0.w2.scale", lambda old: bytes(exponent + 1 for exponent in old))


FAULTS = {fault.__name__: fault for fault in (random_index, dropped_stream, doubled_expert)}


def damaged(model: Path, folder: Path, fault: str) -> Path:
    """A copy of the model in `folder`, with the fault."""
    shutil.copytree(model, folder)
    checkpoint = Checkpoint(folder / "model.safetensors")
    FAULTS[fault](checkpoint)
    checkpoint.path.write_bytes(checkpoint.data)
    return folder
