"""The CUDA compiler's launcher passes on what the compiler says, and fails where ptxas notes serialized wgmma."""

import subprocess
import unittest
from pathlib import Path

LAUNCHER = Path(__file__).parent.parent / "cmake" / "run_nvcc"
NOTE = "ptxas info : (C7511) wgmma.mma_async instructions are serialized due to registers in the function 'f'"


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


if __name__ == "__main__":
    unittest.main()
