//! Every environment variable that is read, in one list.

use super::{Row, row};

/// Readers of what doctor prints must not learn it.
const SECRET: &str = "SYMMEM_SECRET";

/// Names and meanings.
const VARIABLES: [(&str, &str); 30] = [
    ("SYMMEM_TIMEOUT", "seconds after which a wait gives up; 0 for ever; default 300"),
    (
        "SYMMEM_DEVICE_TIMEOUT",
        "the same for kernels of groups that have the default limit; default 1800",
    ),
    (
        "SYMMEM_SOCKET_DIR",
        "where ranks on one host connect; default a private directory in the temporary one",
    ),
    (
        "SYMMEM_HOST",
        "identity of this host; default the boot id; ranks with the same identity are on one host",
    ),
    (
        "SYMMEM_ADDR",
        "the IP address of this rank for other hosts; default the address by which it reaches the store",
    ),
    ("SYMMEM_IFACE", "the network interface with that address"),
    ("SYMMEM_PORTS", "the ports for ranks of other hosts, as in 40000-40099; default any"),
    (
        SECRET,
        "a secret of the job, 16 bytes or more: authenticates values in the store, and encrypts connections between hosts",
    ),
    ("SYMMEM_SECRET_FILE", "the file of mode 0600 with that secret"),
    ("SYMMEM_SIGNAL_PAD_SIZE", "bytes of the signal pad of an allocation"),
    ("SYMMEM_BACKEND", "process or host; default host between processes, process between threads"),
    ("SYMMEM_CUDA_BACKEND", "where memory of GPUs comes from: cuda, nccl or nvshmem; default cuda"),
    ("SYMMEM_STRICT_DEVICES", "1: ranks of a group that share a GPU are an error; default 0"),
    (
        "SYMMEM_RANKS_PER_DEVICE",
        "how many ranks use a GPU at the same time; default: derived from the group",
    ),
    (
        "SYMMEM_COSTS",
        "the file that symmem calibrate writes; default symmem/costs in the user's cache",
    ),
    ("SYMMEM_NVRTC", "the file of NVRTC, for your own kernels; default what the linker finds"),
    (
        "SYMMEM_NCCL",
        "the file of NCCL; default the one in use, that of a Python package, or what the linker finds",
    ),
    ("SYMMEM_NVSHMEM", "the file of NVSHMEM; likewise"),
    (
        "SYMMEM_WIRE",
        "ucx or mesh: transport between hosts; default ucx if there are RDMA devices, all have UCX and there is no secret",
    ),
    ("SYMMEM_UCX", "the file of UCX, libucp.so.0; likewise"),
    ("SYMMEM_REPLACE_GLOO", "1: torch's process groups over gloo are this library's; default 0"),
    ("SYMMEM_VLLM", "1: the communicators of vLLM's CPU ranks are this library's; default 0"),
    ("RANK", "this process's rank in the world; set by symmem run and torchrun"),
    ("WORLD_SIZE", "how many ranks there are; without it this process is alone"),
    ("LOCAL_RANK", "this process's rank on its host"),
    ("LOCAL_WORLD_SIZE", "how many ranks of the job its host has"),
    ("MASTER_ADDR", "the host of the store, or unix: and the path of a socket"),
    ("MASTER_PORT", "the port of the store"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True: the launcher hosts the store, else rank 0 does"),
    ("RUST_LOG", "what is logged to standard error, such as debug or symmem=trace; default warn"),
];

/// One row per variable.
pub(super) fn rows() -> Vec<Row> {
    let value = |name| match std::env::var_os(name) {
        None => "not set".to_owned(),
        Some(_) if name == SECRET => "set".to_owned(),
        Some(value) => value.display().to_string(),
    };
    VARIABLES.iter().map(|&(name, meaning)| row(name, &value(name), meaning)).collect()
}
