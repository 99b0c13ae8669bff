#!/bin/bash
# What several GPUs of this machine do together: tests of every layout, exchanges, then Flash with
# dummy weights, by tensor ranks and (the part data) by data ranks that share the experts.
#
#     bench/several_gpus.sh GPUS BUILD_FOLDER OUTPUT_FOLDER [PART...]
#
# Parts, in the order that says most first: tests, exchanges, model, decode, batch, prefill, engine,
# long, data, nccl (default: all; eleven minutes on two H200s). Each prints to
# OUTPUT_FOLDER/PART.txt. A part that fails ends the run: what comes after would measure something
# broken. Build comm_test, model_test, collective_bench and fathom before, in Release.
set -euo pipefail

gpus=$1 build=$2 out=$3
shift 3
parts=("${@:-tests}")
[ $# -gt 0 ] || parts=(tests exchanges model decode batch prefill engine long data nccl)
flash=(flash --device cuda --load-format dummy)
tensor=(--tensor-parallel-size "$gpus")
data=(--data-parallel-size "$gpus" --enable-expert-parallel)
mkdir -p "$out"

latency() { "$build/fathom" bench latency "${flash[@]}" --num-iters 1 "$@"; }
throughput() { "$build/fathom" bench throughput "${flash[@]}" --temperature 0 "$@"; }
ten() { throughput --num-prompts 10 --input-len 889 --output-len 256 "$@"; }

run_part() {
  case $1 in
    tests) "$build/src/comm/comm_test" --gtest_filter='*Cuda*' ;;
    exchanges) "$build/src/comm/collective_bench" "$gpus" ;;
    model) "$build/src/model/model_test" --gtest_filter='*CudaRanks*:*CudaExpertRanks*:*CudaStages*' ;;
    decode) latency "${tensor[@]}" --prefill-len 0 --input-len 4096,262144 --batch-size 1 --output-len 32 --profile ;;
    batch) latency "${tensor[@]}" --prefill-len 0 --input-len 1024 --batch-size 10,64,256 --output-len 16 ;;
    prefill)
      latency "${tensor[@]}" --input-len 2048,32768 --batch-size 1 --output-len 1 --max-num-batched-tokens 8192 --profile
      ;;
    engine) ten "${tensor[@]}" ;;
    # Behind a prompt that was computed: contents that are made up are chosen from evenly.
    long)
      latency "${tensor[@]}" --input-len 262144 --batch-size 1 --output-len 32 --profile
      throughput "${tensor[@]}" --num-prompts 1 --input-len 262144 --output-len 256
      ;;
    data)
      latency "${data[@]}" --prefill-len 0 --input-len 1024 --batch-size 10,64,256 --output-len 16
      ten "${data[@]}"
      throughput "${data[@]}" --decode-floor 0 --num-prompts 64 --max-num-seqs 64 --input-len 1024 --output-len 1024
      ;;
    nccl)
      latency "${tensor[@]}" --disable-custom-all-reduce --prefill-len 0 --input-len 4096 --batch-size 1 --output-len 16
      ;;
    *) echo "no part $1" >&2 && return 2 ;;
  esac
}

for part in "${parts[@]}"; do
  echo "== $part: $(date +%T)"
  run_part "$part" > "$out/$part.txt" 2>&1 || { tail -40 "$out/$part.txt"; echo "== $part failed"; exit 1; }
  tail -25 "$out/$part.txt"
done
