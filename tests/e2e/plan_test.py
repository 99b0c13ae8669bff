"""`fathom plan`: what fits on which GPUs and how fast it could be; and that the tables of the documentation are what it says."""

import json
import re
import subprocess

import pytest

from server_process import BINARY, ROOT

SIZES = {"TP": "--tensor-parallel-size", "DP": "--data-parallel-size", "PP": "--pipeline-parallel-size"}


def plan(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(BINARY), "plan", *args], capture_output=True, text=True, timeout=60)


def layouts(*args: str) -> list[dict]:
    return json.loads(plan(*args, "--json").stdout)["layouts"]


def flags(layout: str) -> list[str]:
    """'TP 4, DP 2, EP' as flags."""
    out = []
    for word in layout.split(", "):
        out += ["--enable-expert-parallel"] if word == "EP" else [SIZES[word[:2]], word[3:]]
    return out


def gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


def rows(page: str, heading: str) -> list[list[str]]:
    """The first table under a heading, without its head."""
    text = (ROOT / "docs" / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group().strip().split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_layout_that_fits_is_shown_part_by_part():
    done = plan("flash", "--tensor-parallel-size", "2")
    assert done.returncode == 0 and not done.stderr
    assert "flash on 2 x H200" in done.stdout
    for word in ("experts", "workspace", "history blocks", "context       1048576 tokens", "at once", "prefill, 2048 tokens"):
        assert word in done.stdout
    (layout,) = layouts("flash", "--tensor-parallel-size", "2")
    (stage,) = layout["stages"]
    assert layout["fits"] and layout["missing_bytes"] == 0
    assert sum(stage["weights"].values()) == stage["weight_bytes"]
    assert stage["kv_bytes"] <= stage["kv_budget_bytes"]
    used = sum(stage[key] for key in ("weight_bytes", "workspace_bytes", "logits_bytes", "cuda_bytes", "kv_budget_bytes"))
    memory = json.loads(plan("flash", "--tensor-parallel-size", "2", "--json").stdout)["device"]["memory_bytes"]
    assert abs(used - 0.9 * memory) < 2**20


def test_what_does_not_fit_says_by_how_much_and_what_would():
    done = plan("flash", "--max-model-len", "32k")
    assert done.returncode == 3
    assert "does not fit" in done.stdout
    assert re.fullmatch(r"fathom: flash does not fit on 1 x H200 with --tensor-parallel-size 1: \d+\.\d\d GiB more on a GPU are "
                        r"needed; it fits on 2 with --tensor-parallel-size 2\n", done.stderr)
    lacking = float(re.search(r"([\d.]+) GiB more", done.stderr).group(1))
    # What is said to be missing is what is missing.
    assert plan("flash", "--max-model-len", "32k", "--gpu-memory-gib", str(139.8 + lacking / 0.9 + 0.02)).returncode == 0
    assert plan("flash", "--max-model-len", "32k", "--gpu-memory-gib", str(139.8 + lacking / 0.9 - 0.02)).returncode == 3
    assert json.loads(plan("flash", "--json").stdout)["fits_on_gpus"] == 2


def test_layouts_are_ranked_by_what_fits_and_by_speed():
    ranked = layouts("pro", "--gpus", "8", "--gpu", "h200")
    assert [layout["missing_bytes"] for layout in ranked] == sorted(layout["missing_bytes"] for layout in ranked)
    fitting = [layout for layout in ranked if layout["fits"]]
    speeds = [layout["at_best"]["decode_1_at_4096"]["ms"] for layout in fitting]
    assert len(speeds) > 3 and speeds == sorted(speeds)
    for layout in ranked:
        assert layout["tensor_parallel_size"] * layout["data_parallel_size"] * layout["pipeline_parallel_size"] == 8
    shown = plan("pro", "--gpus", "8").stdout
    usable = [layout for layout in fitting if layout["runs_on_gpus"]]
    assert f"one stream is fastest with   {usable[0]['flags']}\n" in shown
    best = max(usable, key=lambda layout: layout["at_best"]["output"]["tokens_per_s"])
    assert f"many are fastest with        {best['flags']}\n" in shown


def test_layouts_that_gpus_do_not_run_are_marked():
    def ranks_of_stage(layout: dict) -> int:
        return layout["tensor_parallel_size"] * layout["data_parallel_size"]

    ranked = layouts("flash", "--gpus", "16")
    assert len(ranked) > 5
    assert [layout["runs_on_gpus"] for layout in ranked] == [ranks_of_stage(layout) <= 8 for layout in ranked]
    shown = plan("flash", "--gpus", "16").stdout
    marked = re.findall(r"^(.*?)\* ", shown.split("\n\nspeeds")[0], re.MULTILINE)
    assert {"TP 16, EP", "TP 4, DP 4, EP", "DP 16, EP"} <= set(marked) and not {"TP 8, PP 2", "DP 8, PP 2, EP"} & set(marked)
    assert shown.endswith("* fathom serve runs it on CPUs only, so far\n")
    assert "--tensor-parallel-size 16*\n" in plan("flash", "--tensor-parallel-size", "16").stdout
    assert all(layout["runs_on_gpus"] for layout in layouts("flash", "--gpus", "8"))
    assert "*" not in plan("flash", "--gpus", "8").stdout


def test_data_ranks_hold_whole_experts_with_the_flag_and_without():
    (cut,), (whole,) = (layouts("flash", "--tensor-parallel-size", "2", "--data-parallel-size", "2", *flag)
                        for flag in ([], ["--enable-expert-parallel"]))
    assert cut["stages"] == whole["stages"] and cut["at_best"] == whole["at_best"]


def test_stages_are_shown_side_by_side():
    done = plan("pro", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "4")
    assert done.returncode == 0, done.stderr
    assert "stage 0   stage 1" in done.stdout
    (layout,) = layouts("pro", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "4")
    first, last = layout["stages"]
    assert first["weights"]["head"] == 0 and last["weights"]["embedding"] == 0
    assert first["weights"]["embedding"] > 0 and last["weights"]["head"] > 0


def test_a_checkpoint_of_its_own_is_planned_by_its_config():
    done = plan(str(ROOT / "models" / "fathom-tiny"), "--gpu", "rtx-pro-6000")
    assert done.returncode == 0 and "RTX PRO 6000" in done.stdout


def test_the_roofline_of_a_layout_counts_what_ranks_exchange():
    done = subprocess.run([str(BINARY), "inspect", "flash", "--roofline", "--tensor-parallel-size", "4"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sum of the heads" in done.stdout and "x 43" in done.stdout and "of waiting for others" in done.stdout


@pytest.mark.parametrize("args,expected", [
    (["flash", "--gpu", "tpu"], "h200"),
    (["flash", "--gpus", "0"], "1 to 64"),
    (["tiny", "--gpus", "64"], "use fewer"),
    (["flash", "--gpus", "4", "--tensor-parallel-size", "2"], "does not go with"),
    (["flash", "--max-model-len", "long"], "--max-model-len"),
    (["flash", "--max-model-len", "4M"], "1048576"),
    (["flash", "--pipeline-parallel-size", "44"], "43 layers"),
    (["flash", "--tensor-parallel-size", "65"], "64 heads"),
    (["flash", "--tensor-parallel-size", "two"], "--tensor-parallel-size"),
    (["flash", "--data-parallel-size", "512", "--enable-expert-parallel"], "256 experts"),
    (["flash", "--max-num-seqs", "16384"], "--max-num-batched-tokens"),
    (["flash", "--gpu-memory-gib", "-1"], "--gpu-memory-gib"),
    (["flash", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
    (["flash", "--frobnicate"], "--frobnicate"),
    ([], "model is required"),
])
def test_nonsense_is_one_line_and_exit_code_2(args, expected):
    done = plan(*args)
    assert done.returncode == 2 and not done.stdout
    assert expected in done.stderr and done.stderr.startswith("fathom: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [["tiny"], ["pro", "--gpus", "8", "--json"]], ids=["short", "long"])
def test_an_output_that_is_lost_is_an_error(args):
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(BINARY), "plan", *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr and done.stderr.count("\n") == 1


def test_help_names_every_flag():
    text = plan("--help").stdout
    for flag in ("--gpus", "--gpu", "--gpu-memory-gib", "--gpu-memory-utilization", *SIZES.values(), "--enable-expert-parallel",
                 "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--enable-prefix-caching", "--streams",
                 "--input-len", "--output-len", "--layers", "--json"):
        assert flag + " " in text or flag + "," in text, flag
    assert re.search(r"^  plan ", subprocess.run([str(BINARY), "--help"], capture_output=True, text=True).stdout, re.MULTILINE)


@pytest.mark.parametrize("row", rows("operations.md", "What fits where"), ids=lambda row: ", ".join(row[:3]))
def test_the_table_of_what_fits_is_what_the_command_says(row):
    model, gpus, layout = row[0], row[1].split(" x ")[1], row[2]
    (found,) = layouts(model.lower(), "--gpu", gpus.lower().replace(" ", "-"), *flags(layout))
    fullest = min(found["stages"], key=lambda stage: stage["kv_budget_bytes"])
    expected = [gib(fullest["weight_bytes"]), gib(fullest["workspace_bytes"])]
    if found["fits"]:
        at_once = {entry["tokens"]: entry["at_once"] for entry in found["requests"]}
        expected += [gib(fullest["kv_budget_bytes"]), f"{found['tokens_held'] / 1e6:.1f}M", str(at_once[131072]), str(at_once[1048576])]
    else:
        expected += [f"lacks {gib(found['missing_bytes'])}", "", "", ""]
    assert row[3:] == expected


# Of each case of the table of floors: the flags beside the layout, and which figure.
CASES = {
    "1 stream at 4K, tokens/s": ([], lambda best: best["decode_1_at_4096"]["tokens_per_s"]),
    "1 stream at 256K, slower than at 4K": ([], lambda best: 100 * (best["decode_1_at_262144"]["ms"] / best["decode_1_at_4096"]["ms"] - 1)),
    "10 streams, 889 in, 256 out, decode tokens/s": (["--streams", "10", "--input-len", "889", "--output-len", "256"],
                                                     lambda best: best["decode_10_at_1017"]["tokens_per_s"]),
    "64 streams, 1K in, 1K out, output tokens/s": ([], lambda best: best["output"]["tokens_per_s"]),
    "256 streams, 8K in, 1K out, output tokens/s": (["--streams", "256", "--max-num-seqs", "256", "--input-len", "8192"],
                                                    lambda best: best["output"]["tokens_per_s"]),
    "prefill of 32K, tokens/s": ([], lambda best: best["prefill_32768"]["tokens_per_s"]),
    "first token of 2,048, ms": ([], lambda best: best["prefill_2048"]["ms"]),
}


@pytest.mark.parametrize("row", rows("performance.md", "Several GPUs: floors and goals"), ids=lambda row: f"{row[0]} {row[1]}")
def test_the_table_of_floors_is_what_the_command_says(row):
    case, layout, floor, goal, aim, goal_share, aim_share = row
    args, figure = CASES[case]
    (found,) = layouts("flash", *flags(layout), "--max-num-batched-tokens", "8192", *args)
    bound = figure(found["at_best"])
    if case.endswith("slower than at 4K"):
        assert floor == f"{bound:.1f}%"
        return
    digits = 1 if case.endswith("ms") else 0
    assert floor == f"{bound:,.{digits}f}"
    for wanted, share in ((goal, goal_share), (aim, aim_share)):
        value = float(wanted.replace(",", ""))
        ratio = bound / value if case.endswith("ms") else value / bound
        assert share == f"{100 * ratio:.0f}%"
