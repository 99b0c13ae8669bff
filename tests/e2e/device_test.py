"""Where there is no GPU that can be used: one line and exit code 5 where one was asked for, else the CPU. And what the
binary carries for GPUs."""

import os
import struct
import subprocess

import pytest

from server_process import BINARY, MODEL

# All that is asked of a driver that is too old.
OLD_DRIVER = """
#include <string.h>
int cuDriverGetVersion(int* version) { *version = 11040; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuGetProcAddress(const char* name, void** entry, int version, unsigned long flags) {
  *entry = !strcmp(name, "cuDriverGetVersion") ? (void*)cuDriverGetVersion : !strcmp(name, "cuInit") ? (void*)cuInit : 0;
  return *entry ? 0 : 500;
}
"""


def fathom(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(BINARY), *arguments], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, **environment})


def generate(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    return fathom("generate", str(MODEL), "--prompt", "Once", "--max-tokens", "2", *flags, **environment)


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory) -> dict[str, str]:
    """An environment in which the driver is too old."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(OLD_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("command", [["serve", str(MODEL)], ["generate", str(MODEL), "--prompt", "Once"],
                                     ["bench", "latency", "tiny", "--load-format", "dummy"]], ids=lambda c: c[0])
def test_no_gpu_is_one_line_where_one_was_asked_for(command):
    refused = fathom(*command, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert refused.returncode == 5 and refused.stderr.count("\n") == 1 and refused.stdout == ""
    assert "--device cpu" in refused.stderr


def test_a_gpu_that_is_hidden_is_not_missed():
    found = generate(CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0 and "GPU" not in found.stderr, found.stderr


def test_an_old_driver_is_named_with_what_is_needed(old_driver):
    refused = generate("--device", "cuda", **old_driver)
    if "built without CUDA" in refused.stderr:
        pytest.skip("the binary was built without CUDA")
    assert refused.returncode == 5 and refused.stderr.count("\n") == 1 and refused.stdout == ""
    assert "driver is one for CUDA 11.4" in refused.stderr and "or newer" in refused.stderr
    without = generate(**old_driver)
    assert without.returncode == 0
    assert "the CPU is used: " in without.stderr and "driver is one for CUDA 11.4" in without.stderr


def test_the_binary_carries_machine_code_and_nothing_to_compile():
    data, kinds, at = BINARY.read_bytes(), [], 0
    begin_of_fat_binary = struct.pack("<IHH", 0xBA55ED50, 1, 16)  # and its bytes, and then what is in it
    while (at := data.find(begin_of_fat_binary, at)) >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        at += 16
        end = at + size
        while at < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            kinds.append(kind)
            at += header + payload
    if not kinds:
        pytest.skip("the binary was built without CUDA")
    assert set(kinds) == {2}  # 1 would be PTX, which the driver compiles
    assert b"nvrtc" not in data
