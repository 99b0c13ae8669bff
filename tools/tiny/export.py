"""Writes trained masters as an official-format checkpoint folder, and reads one back.

    python export.py MASTERS_FOLDER MODEL_FOLDER

The folder then holds model.safetensors beside the JSON files (config.py, train_tokenizer.py). Scales are F8_E8M0, FP4
experts I8 with the even column in the low nibble, one tensor an expert, names as in the published checkpoints.
"""
import argparse
import pathlib

import torch
from safetensors.torch import load_file, save_file

import config
import model as tiny
import quant


def e8m0(scale):
    """Exponent bytes of powers of two."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def from_e8m0(scale):
    return (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def unpack_fp4(packed):
    codes = packed.view(torch.uint8).to(torch.int64)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return sizes[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def stored(masters):
    """{official name: tensor} of a checkpoint."""
    out = {}
    for name, value in masters.items():
        kind = tiny.storage(name)
        if kind == "fp8":
            q, scale = quant.weight_fp8(value)
            out[name], out[name.removesuffix("weight") + "scale"] = q, e8m0(scale)
        elif kind == "fp4":
            prefix, part = name.rsplit(".", 1)
            for e, matrix in enumerate(value):
                q, scale = quant.weight_fp4(matrix)
                out[f"{prefix}.{e}.{part}.weight"] = quant.pack_fp4(q)
                out[f"{prefix}.{e}.{part}.scale"] = e8m0(scale)
        elif name.endswith("_fn"):
            out[name] = value.to(torch.bfloat16).float()
        else:
            out[name] = value.clone() if kind == "f32" else value.to(torch.bfloat16)
    return {n: out[n].contiguous() for n in sorted(out)}


def prepared(folder):
    """What tiny.prepare() makes, from the checkpoint alone."""
    tensors = load_file(pathlib.Path(folder) / "model.safetensors")
    out, groups = {}, {}
    for name, value in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale") if name.endswith("weight") else None
        if name.endswith(".scale"):
            continue
        if value.dtype == torch.int8:
            value = (unpack_fp4(value) * from_e8m0(scale).repeat_interleave(32, -1)).to(torch.bfloat16)
            prefix, expert, part, _ = name.rsplit(".", 3)
            groups.setdefault(f"{prefix}.{part}", {})[int(expert)] = value
            continue
        if value.dtype == torch.float8_e4m3fn:
            spread = from_e8m0(scale).repeat_interleave(128, -2).repeat_interleave(128, -1)
            value = (value.float() * spread).to(torch.bfloat16)
        elif name.endswith("_fn"):
            value = value.to(torch.bfloat16)
        elif name.endswith("norm.weight"):
            value = value.float()
        out[name] = value
    for name, parts in groups.items():
        out[name] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def check(masters, folder):
    """The checkpoint holds exactly the weights that training multiplied with."""
    want, got = tiny.prepare(masters), prepared(folder)
    assert want.keys() == got.keys(), sorted(want.keys() ^ got.keys())[:5]
    for name in want:
        assert want[name].dtype == got[name].dtype and torch.equal(want[name], got[name]), name


def load_masters(folder):
    masters = {}
    for path in sorted(pathlib.Path(folder).glob("masters-*.pt")):
        masters |= torch.load(path)
    return {n: v.float() if v.is_floating_point() else v.long() for n, v in masters.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("masters")
    parser.add_argument("model")
    args = parser.parse_args()
    masters = load_masters(args.masters)
    config.write(args.model)
    path = pathlib.Path(args.model) / "model.safetensors"
    save_file(stored(masters), path, metadata={"format": "pt"})
    check(masters, args.model)
    count = sum(v.numel() for n, v in masters.items() if v.is_floating_point())
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {count / 1e6:.2f} million parameters")


if __name__ == "__main__":
    main()
