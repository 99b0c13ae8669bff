"""Writes trained masters as an official-format checkpoint folder, and reads one back.

    python export.py MASTERS_FOLDER MODEL_FOLDER
    python export.py DRAFT_FOLDER MODEL_FOLDER --target TARGET_MODEL_FOLDER   # a DSpark draft of dspark.py beside its target

The folder then holds model.safetensors beside the JSON files (config.py, train_tokenizer.py). Scales are F8_E8M0, FP4
experts I8 with the even column in the low nibble, one tensor an expert, names as in the published checkpoints.
"""
import argparse
import pathlib
import shutil

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


def joined(folder, draft):
    """A target's checkpoint with a DSpark draft in the place of its MTP block."""
    target = load_file(pathlib.Path(folder) / "model.safetensors")
    return {n: v for n, v in target.items() if not n.startswith("mtp.")} | stored(draft)


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
    """The checkpoint holds exactly the weights that training multiplied with, and the target's if these are a draft's."""
    want, got = tiny.prepare(masters), prepared(folder)
    assert want.keys() == got.keys() or all(n.startswith("mtp.") for n in want), sorted(want.keys() ^ got.keys())[:5]
    for name in want:
        assert want[name].dtype == got[name].dtype and torch.equal(want[name], got[name]), name


PIECES = 4


def save_masters(masters, folder):
    """What prepare() makes of masters, exactly, in files below 16 MiB: preparing that once more changes nothing."""
    parts, sizes = [{} for _ in range(PIECES)], [0] * PIECES
    for name, value in sorted(tiny.prepare(masters).items(), key=lambda kv: -kv[1].numel()):
        at = sizes.index(min(sizes))
        value = value.to(torch.bfloat16) if name.endswith("norm.weight") else value
        parts[at][name] = value.to(torch.int16).cpu() if name.endswith("tid2eid") else value.cpu()
        sizes[at] += value.numel()
    for i, part in enumerate(parts):
        torch.save(part, pathlib.Path(folder) / f"masters-{i}.pt")


def load_masters(folder):
    """Of save_masters(), or those of a checkpoint folder."""
    folder = pathlib.Path(folder)
    masters = prepared(folder) if (folder / "model.safetensors").exists() else {}
    for path in sorted(folder.glob("masters-*.pt")):
        masters |= torch.load(path)
    return {n: v.float() if v.is_floating_point() else v.long() for n, v in masters.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("masters")
    parser.add_argument("model")
    parser.add_argument("--target", help="the masters are a DSpark draft's, and this is the model they were trained for")
    args = parser.parse_args()
    masters = load_masters(args.masters)
    path = pathlib.Path(args.model) / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    config.write(args.model, config.DSPARK if args.target else {})
    save_file(joined(args.target, masters) if args.target else stored(masters), path, metadata={"format": "pt"})
    if args.target:
        shutil.copy(pathlib.Path(args.target) / "tokenizer.json", path.parent)
    check(masters, args.model)
    count = sum(v.numel() for n, v in masters.items() if v.is_floating_point())
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {count / 1e6:.2f} million parameters")


if __name__ == "__main__":
    main()
