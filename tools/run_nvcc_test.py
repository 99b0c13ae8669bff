"""The CUDA compiler's launcher passes on what the compiler says, but for registers, and fails where ptxas notes
serialized wgmma or values that spill."""

import subprocess
import unittest
from pathlib import Path

LAUNCHER = Path(__file__).parent.parent / "cmake" / "run_nvcc"
NOTE = "ptxas info : (C7511) wgmma.mma_async instructions are serialized due to registers in the function 'f'"
REGISTERS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {stack} bytes spill stores, {stack} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compile time = 94.780 ms"""


def run(script: str) -> subprocess.CompletedProcess:
    return subprocess.run([LAUNCHER, "bash", "-c", script], capture_output=True, text=True)


class RunNvcc(unittest.TestCase):
    def test_output_and_status_are_the_compilers(self):
        found = run("echo out; echo 'a warning' >&2; exit 3")
        self.assertEqual((found.returncode, found.stdout, found.stderr), (3, "out\n", "a warning\n"))

    def test_other_notes_are_no_error(self):
        self.assertEqual(run("echo 'ptxas info : (C7519) warpgroup.arrive is injected' >&2").returncode, 0)

    def test_serialized_wgmma_is_an_error_behind_the_note(self):
        found = run(f'echo "{NOTE}" >&2')
        self.assertEqual(found.returncode, 1)
        note, error = found.stderr.splitlines()
        self.assertEqual(note, NOTE)
        self.assertTrue(error.startswith("error: "), error)

    def test_registers_are_not_passed_on(self):
        found = run(f'echo "{REGISTERS.format(name="f", stack=0)}" >&2; echo "a warning" >&2')
        self.assertEqual((found.returncode, found.stderr), (0, "a warning\n"))

    def test_a_kernel_that_spills_is_an_error_unless_it_is_listed(self):
        found = run(f'echo "{REGISTERS.format(name="_Z9NewKernelv", stack=16)}" >&2')
        self.assertEqual(found.returncode, 1)
        kernel, error = found.stderr.splitlines()
        self.assertTrue(kernel.startswith("_Z9NewKernelv: ") and "16 bytes spill stores" in kernel, kernel)
        self.assertTrue(error.startswith("error: "), error)
        listed = run(f'echo "{REGISTERS.format(name="_Z14SamplingKernelv", stack=16)}" >&2')
        self.assertEqual((listed.returncode, listed.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
