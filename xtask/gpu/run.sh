#!/usr/bin/env bash
# Everything that wants a CUDA device, step by step, from the directory that `cargo xtask gpu` has filled. Needs no Rust.
#
#   OUT                  where it is set, the output goes to $OUT/log as well, and the figures to $OUT/bench-*.json
#   SYMMEM_GPU_SECONDS   how long all steps together may take (default 470)
#   SYMMEM_GPU_STEPS     "tests", "bench", or both (the default)
#   SYMMEM_GPU_ROUNDS    rounds of the benchmark (default 1)
#   PEERS_PYTHON         a Python that has torch with CUDA (default python3)
set -u
here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${OUT-}" ] && [ -z "${SYMMEM_GPU_LOGGED-}" ]; then
  mkdir -p "$OUT"
  SYMMEM_GPU_LOGGED=1 bash "$0" "$@" 2>&1 | tee "$OUT/log"
  exit "${PIPESTATUS[0]}"
fi
end=$((SECONDS + ${SYMMEM_GPU_SECONDS:-470}))
summary=() failed=0 mps=
case ${SYMMEM_GPU_STEPS:-both} in
both) do_tests=1 do_bench=1 ;;
tests) do_tests=1 do_bench= ;;
bench) do_tests= do_bench=1 ;;
*) echo "SYMMEM_GPU_STEPS: expected tests, bench or both, got $SYMMEM_GPU_STEPS" >&2 && exit 2 ;;
esac

note() { # NAME SECONDS VERDICT
  summary+=("$(printf '%-28s %4d s  %s' "$1" "$2" "$3")")
  printf '=== %s: %s\n' "$1" "$3"
}

step() { # NAME LIMIT COMMAND...: at most so many seconds, and what is left of all
  local name=$1 limit=$2 left=$((end - SECONDS)) begin=$SECONDS status
  shift 2
  printf '\n=== %s\n' "$name"
  if [ "$left" -lt 5 ]; then
    failed=$((failed + 1))
    note "$name" 0 "FAILED: no time was left for it"
    return
  fi
  [ "$limit" -lt "$left" ] || limit=$left
  timeout -k 5 "$limit" "$@" </dev/null
  status=$?
  case $status in
  0) note "$name" $((SECONDS - begin)) passed ;;
  124 | 137) failed=$((failed + 1)) && note "$name" $((SECONDS - begin)) "FAILED: not done in $limit s" ;;
  *) failed=$((failed + 1)) && note "$name" $((SECONDS - begin)) "FAILED: status $status" ;;
  esac
}

start_mps() { # so that processes share the device at the same time instead of in turns of milliseconds
  command -v nvidia-cuda-mps-control >/dev/null || return
  mps=$(mktemp -d) || return
  mkdir "$mps/pipe" "$mps/log"
  export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
  timeout -k 5 20 nvidia-cuda-mps-control -d
}

stop_mps() {
  [ -n "$mps" ] || return
  local pid
  pid=$(cat "$mps/pipe/nvidia-cuda-mps-control.pid" 2>/dev/null)
  echo "quit -t 5" | timeout -k 5 20 nvidia-cuda-mps-control >/dev/null 2>&1
  [ -z "$pid" ] || kill "$pid" 2>/dev/null
  [ "$failed" -eq 0 ] || tail -n 5 "$mps/log/control.log" "$mps/log/server.log" 2>/dev/null
  rm -rf "$mps"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  mps=
  return 0
}
trap stop_mps EXIT
trap 'exit 130' INT TERM

shared() { # as step, under MPS: what is killed in the middle of a kernel takes the service with it
  local before=$failed
  step "$@"
  [ "$failed" -eq "$before" ] || { stop_mps && start_mps; }
}

tests() { # NAME LIMIT OPTION...: ranks are processes that the tests start
  shared "$1" "$2" "$here/cuda-tests" --ignored --test-threads 1 "${@:3}"
}

measure() { # RANKS SIZES FILE [OPTION...]
  shared "bench, $1 ranks, $2" 150 "$here/symmem" bench --backend cuda --graph -n "$1" --bytes "$2" \
    --rounds "${SYMMEM_GPU_ROUNDS:-1}" --dtype bf16,f32 "${@:4}" ${OUT:+--json "$OUT/$3"}
}

if command -v nvidia-smi >/dev/null; then
  step device 20 nvidia-smi --query-gpu=index,name,driver_version,memory.total,compute_mode --format=csv
else
  step device 20 "$here/symmem" doctor
fi
if [ -n "$do_tests" ]; then
  step "driver tests" 30 "$here/sys-tests" --ignored --test-threads 1
  # NCCL of torch, where there is one, else what the linker finds.
  nccl=$("${PEERS_PYTHON:-python3}" -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null)/lib/libnccl.so.2
  [ ! -e "$nccl" ] || [ -n "${SYMMEM_NCCL-}" ] || export SYMMEM_NCCL=$nccl
  step "NCCL tests" 90 "$here/nccl-tests" --ignored --test-threads 1 --skip as_two_hosts
  nvshmem=$("${PEERS_PYTHON:-python3}" -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])' 2>/dev/null)/lib/libnvshmem_host.so.3
  [ ! -e "$nvshmem" ] || [ -n "${SYMMEM_NVSHMEM-}" ] || export SYMMEM_NVSHMEM=$nvshmem
  # Without MPS, which ends the work of all its clients when one dies in the middle of a kernel.
  step "a rank that dies" 30 "$here/cuda-tests" --ignored --test-threads 1 dies
  step "a rank killed in its kernel" 60 "$here/cuda-tests" --ignored --test-threads 1 killed_in_its_kernel
  step "a rank gone between replays" 90 "$here/cuda-tests" --ignored --test-threads 1 between_replays
fi
if start_mps; then
  [ -z "$do_tests" ] || shared "NCCL, 2 ranks" 60 "$here/nccl-tests" --ignored --test-threads 1 as_two_hosts
  for ranks in ${do_tests:+1 2 4 8}; do
    SYMMEM_GPU_RANKS=$ranks tests "tests, $ranks ranks" 100 --skip dies --skip killed_in_its_kernel --skip between_replays
    [ "$ranks" -lt 8 ] || continue
    SYMMEM_GPU_RANKS=$ranks shared "NVSHMEM, $ranks ranks" 60 "$here/nvshmem-tests" --ignored --test-threads 1
    SYMMEM_GPU_RANKS=$ranks shared "memory of NCCL, $ranks ranks" 60 "$here/nccl-memory-tests" --ignored --test-threads 1
  done
  for ranks in ${do_bench:+2 4 8}; do
    measure "$ranks" 1K,16K,64K,256K,1M,16M,128M "bench-$ranks.json" "--peers=$here"
  done
else
  [ -z "$do_tests" ] ||
    SYMMEM_GPU_RANKS=1,2 tests "tests without MPS" 150 --skip dies --skip killed_in_its_kernel --skip between_replays
  note bench 0 "skipped: without MPS processes take turns of milliseconds"
fi
stop_mps
if [ -z "$do_tests" ]; then
  :
elif command -v compute-sanitizer >/dev/null; then
  # Calls that the driver refuses are no errors of ours: whether it grants fabric handles is found out by asking for one.
  SYMMEM_GPU_RANKS=1 step sanitizer 90 compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 \
    "$here/cuda-tests" --ignored --test-threads 1 moves experts signals_and_kernels graph_is_replayed
else
  note sanitizer 0 "skipped: no compute-sanitizer"
fi

printf '\nsummary\n'
printf '  %s\n' "${summary[@]}"
[ "$failed" -eq 0 ] && echo "all passed" || echo "$failed failed"
exit $((failed > 0))
