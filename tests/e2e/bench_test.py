"""`fathom bench` on the built-in model and the CPU: what it prints and writes, and what it refuses."""

import json
import subprocess

import pytest

from server_process import BINARY, MODEL


def bench(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(BINARY), "bench", *args], capture_output=True, text=True, timeout=120)


def test_latency_measures_every_batch_with_every_prompt(tmp_path):
    results = tmp_path / "latency.json"
    done = bench("latency", str(MODEL), "--device", "cpu", "--input-len", "16,300", "--batch-size", "1,2",
                 "--output-len", "4", "--num-iters", "2", "--output-json", str(results))
    assert done.returncode == 0, done.stderr
    written = json.loads(results.read_text())
    assert written["num_hidden_layers"] == 7
    assert [(c["input_len"], c["batch_size"]) for c in written["cases"]] == [(16, 1), (16, 2), (300, 1), (300, 2)]
    for case in written["cases"]:
        assert len(case["latencies"]) == 2 and case["avg_latency"] > 0
        assert case["prefill"]["median_ms"] > 0 and case["decode"]["median_ms"] > 0
        # The model takes 2 experts a token; sequences may share them.
        assert 2 <= case["decode"]["experts_per_layer"] <= 2 * case["batch_size"]
        # A CPU's ceilings are not known: no share is claimed.
        assert "floor_ms" not in case["decode"]
        assert f"batch {case['batch_size']}, {case['input_len']} tokens in" in done.stdout


def test_latency_of_decode_alone(tmp_path):
    results = tmp_path / "decode.json"
    done = bench("latency", "tiny", "--load-format", "dummy", "--num-hidden-layers", "3", "--device", "cpu",
                 "--input-len", "700", "--prefill-len", "0", "--batch-size", "2", "--output-len", "3",
                 "--num-iters", "1", "--json", str(results))
    assert done.returncode == 0, done.stderr
    written = json.loads(results.read_text())
    assert written["num_hidden_layers"] == 3
    assert "prefill" not in written["cases"][0] and written["cases"][0]["decode"]["median_ms"] > 0


@pytest.mark.parametrize("layout", [[], ["--data-parallel-size", "2"]])
def test_throughput_counts_all_tokens(layout, tmp_path):
    results = tmp_path / "throughput.json"
    done = bench("throughput", str(MODEL), "--device", "cpu", "--num-prompts", "4", "--input-len", "32",
                 "--output-len", "200", "--profile", "--output-json", str(results), *layout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Throughput: ")
    assert "between two decode steps" in done.stdout and "aggregate decode" in done.stdout
    written = json.loads(results.read_text())
    assert written["total_num_tokens"] == 4 * (32 + 200)
    assert written["tokens_per_second"] == pytest.approx(written["output_tokens_per_second"] * 232 / 200)
    assert written["between_steps_us"] > 0 and written["decode_step"]["p50_ms"] > 0


def test_load_says_how_long_until_ready(tmp_path):
    results = tmp_path / "load.json"
    done = bench("load", str(MODEL), "--device", "cpu", "--output-json", str(results))
    assert done.returncode == 0, done.stderr
    written = json.loads(results.read_text())
    assert written["bytes"] > 15_000_000
    assert 0 < written["transfer_seconds"] <= written["ready_seconds"]


@pytest.mark.parametrize("args, code, text", [
    (["latency", "tiny", "--device", "cpu", "--num-hidden-layers", "3"], 2, "--load-format dummy"),
    (["latency", "tiny", "--device", "cpu"], 4, "tiny is a size without weights: add --load-format dummy"),
    (["kernels", "tiny", "--device", "cpu", "--load-format", "dummy"], 2, "GPU"),
    (["latency", "tiny", "--load-format", "dummy", "--device", "cpu", "--output-len", "0", "--prefill-len", "0"], 2,
     "nothing to run"),
    (["latency", "tiny", "--load-format", "dummy", "--only-rank", "0"], 2, "--tensor-parallel-size of 2 or more"),
    (["latency", "tiny", "--load-format", "dummy", "--only-rank", "0", "--tensor-parallel-size", "2",
      "--pipeline-parallel-size", "2"], 2, "without data ranks, stages and --enable-expert-parallel"),
    (["latency", "tiny", "--load-format", "dummy", "--only-rank", "0", "--tensor-parallel-size", "2",
      "--enable-expert-parallel"], 2, "without data ranks, stages and --enable-expert-parallel"),
    (["kernels", "tiny", "--load-format", "dummy", "--only-rank", "2", "--tensor-parallel-size", "2"], 2,
     "has ranks 0 to 1"),
    (["latency", "tiny", "--load-format", "dummy", "--only-rank", "0", "--tensor-parallel-size", "2",
      "--device", "cpu"], 2, "--only-rank runs on a GPU"),
    (["throughput", "tiny", "--load-format", "dummy", "--only-rank", "0"], 2, "--only-rank"),
    (["throughput", "tiny", "--load-format", "dummy", "--device", "cpu", "--profile", "--num-prompts", "129",
      "--data-parallel-size", "2"], 2, "--max-num-seqs 64 on each data rank"),
    (["throughput", "tiny", "--load-format", "dummy", "--device", "cpu", "--profile", "--pipeline-parallel-size", "2"],
     2, "leave --pipeline-parallel-size out"),
    (["latency", "tiny", "--load-format", "dummy", "--device", "cpu", "--input-len", "9999999"], 2,
     "max_position_embeddings"),
    (["throughput"], 2, "model is required"),
    (["nothing"], 2, "'nothing' is not a command"),
    (["--nothing"], 2, "--nothing is not a flag of fathom bench"),
    (["load", str(MODEL), "--json", "/dev/null/results.json"], 2, "cannot write /dev/null/results.json"),
])
def test_what_cannot_be_measured_is_one_line(args, code, text):
    done = bench(*args)
    assert done.returncode == code
    assert text in done.stderr and done.stderr.count("\n") == 1
