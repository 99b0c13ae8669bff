# The few commands of daily work; CMakePresets.json has the details. Each target installs what it needs
# first (scripts/setup), which takes no time when all is there.
JOBS ?= $(shell nproc)
PYTHON := .venv/bin/python
SOURCES = git ls-files '*.h' '*.cc' '*.cu' '*.cuh'

.PHONY: build test test-clients serve oracle test-gpu memcheck racecheck format check-format lint asan tsan clean

build:  ## the binary, at build/fathom
	scripts/setup
	cmake --preset release
	cmake --build --preset release --target fathom -j $(JOBS)

test:  ## every test that needs no GPU and no torch
	scripts/setup --test
	cmake --preset release
	cmake --build --preset release -j $(JOBS)
	ctest --test-dir build -j $(JOBS) --output-on-failure --no-tests=error
	$(PYTHON) -m pytest tests/e2e

test-clients:  ## Node SDKs, the Vercel AI SDK, Claude Code and Codex against a scripted model; no network but loopback
	scripts/setup --clients
	cmake --preset release
	cmake --build --preset release --target scripted_server -j $(JOBS)
	tests/clients/run

oracle: build  ## the binary against independent implementations; rewrites tests/golden, which must still hold
	scripts/setup --oracle
	cmake --build --preset release --target tokenize_lines model_test -j $(JOBS)
	$(PYTHON) tests/oracle/check_numerics.py
	$(PYTHON) tests/oracle/compare.py --binary build/fathom --numerics fp32 --configs 4
	$(PYTHON) tests/oracle/compare.py --binary build/fathom --numerics official --sums canonical --configs 2
	$(PYTHON) tests/oracle/compare.py --binary build/fathom --numerics official --configs 1 --same-chunks 1,3,64,257
	$(PYTHON) tests/oracle/tokenizer_parity.py build/src/text/tokenize_lines --megabytes 1
	$(PYTHON) -m unittest discover tools/tiny
	$(PYTHON) tests/oracle/make_op_vectors.py
	$(PYTHON) tests/oracle/make_golden.py
	ctest --test-dir build -R '^model\.' -j $(JOBS) --output-on-failure --no-tests=error

PORT ?= 8000
serve: build  ## the built-in model on PORT
	build/fathom serve models/fathom-tiny --served-model-name fathom-tiny --port $(PORT)

test-gpu:  ## the tests of device code, on a machine with a GPU
	scripts/setup --test
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS)
	ctest --test-dir build-cuda -j 1 --output-on-failure --no-tests=error
	FATHOM_BINARY=$(CURDIR)/build-cuda/fathom $(PYTHON) -m pytest tests/e2e/gpu_ranks_test.py

SANITIZER = .venv/lib/python3*/site-packages/nvidia/cu13/bin/compute-sanitizer --error-exitcode 1
memcheck:  ## kernels' tests under compute-sanitizer's memcheck, on a machine with a GPU
	scripts/setup --test --racecheck
	cmake --preset cuda
	cmake --build --preset cuda --target kernels_test -j $(JOBS)
	$(SANITIZER) --tool memcheck build-cuda/src/kernels/kernels_test --gtest_filter='*Cuda*'

# In a build of its own, with fewer sizes (src/kernels/cuda_testing.h).
racecheck:  ## kernels' tests under compute-sanitizer's racecheck, on a machine with a GPU
	scripts/setup --test --racecheck
	cmake --preset racecheck
	cmake --build --preset racecheck --target kernels_test -j $(JOBS)
	$(SANITIZER) --tool racecheck --kernel-name-exclude kns=TileKernel build-racecheck/src/kernels/kernels_test --gtest_filter='*Cuda*'

format:  ## rewrites the sources in the one style
	scripts/setup --lint
	$(SOURCES) | xargs .venv/bin/clang-format -i

check-format:
	scripts/setup --lint
	$(SOURCES) | xargs .venv/bin/clang-format --dry-run -Werror

# clang-tidy takes seconds a file, so it looks at what differs from BASE; BASE= means every file.
BASE ?= origin/main
lint: check-format  ## layers, format, clang-tidy
	python3 tools/check_includes.py
	cmake --preset release
	scripts/tidy "$(BASE)"

asan:  ## every C++ test under AddressSanitizer and UndefinedBehaviorSanitizer
	scripts/setup
	cmake --preset asan
	cmake --build --preset asan -j $(JOBS)
	ctest --test-dir build-asan -j $(JOBS) --output-on-failure --no-tests=error

tsan:  ## every C++ test under ThreadSanitizer
	scripts/setup
	cmake --preset tsan
	cmake --build --preset tsan -j $(JOBS)
	ctest --test-dir build-tsan -j $(JOBS) --output-on-failure --no-tests=error

clean:
	rm -rf build build-debug build-asan build-tsan build-host build-cuda build-racecheck
