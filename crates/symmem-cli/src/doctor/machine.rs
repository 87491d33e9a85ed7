//! What the kernel and the machine offer.

use std::fs::read_to_string;
use std::path::PathBuf;

use rustix::fs::{Access, MemfdFlags, SealFlags, access, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{Resource, getrlimit};

use symmem::internals::{InUse, Origin};
use symmem_sys::Library;

use super::{Row, backends, checked, row};

/// One row per feature.
pub(super) fn rows() -> Vec<Row> {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    vec![
        row("kernel", "", kernel),
        row(
            "cores",
            &cores.to_string(),
            "this program may use; more ranks than cores make waits slow",
        ),
        costs(),
        memory(),
        checked(
            "memfd_create and seals",
            sealed_memfd().map(|()| "memory that peers can map and nobody can shrink".to_owned()),
        ),
        checked("directory for sockets", socket_dir()),
        descriptors(),
        huge_pages(),
        checked("transparent huge pages", transparent_huge_pages()),
        checked("NVRTC", nvrtc()),
        row("user namespaces", "not needed", ""),
        row("/dev/shm", "not needed", "memory is shared by descriptor, its size does not matter"),
    ]
}

fn nvrtc() -> Result<String, String> {
    let use_of = "only for your own kernels that are compiled at run time";
    match backends::found(Library::Nvrtc) {
        Ok(text) => Ok(format!("{text}; {use_of}")),
        Err(missing) => Err(format!("{missing}; not needed, {use_of}; see SYMMEM_NVRTC")),
    }
}

fn costs() -> Row {
    let origin = InUse::find().origin;
    let verdict = match origin {
        Origin::File(_) => "measured",
        Origin::BuiltIn | Origin::Ignored(..) => "built in",
    };
    row("costs", verdict, format!("what algorithms are chosen by: {origin}"))
}

/// Does what the `host` backend does to get memory.
pub(super) fn sealed_memfd() -> Result<(), String> {
    let said = |call: &'static str| move |error| format!("{call} fails: {error}");
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("symmem-doctor", flags).map_err(said("memfd_create"))?;
    ftruncate(&fd, 4096).map_err(said("ftruncate of a memfd"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    fcntl_add_seals(&fd, seals).map_err(said("sealing a memfd"))
}

fn memory() -> Row {
    let info = read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
    };
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1 << 30) as f64);
    let kib = |name| field(name).map_or_else(|| "unknown".to_owned(), |kib| gib(kib << 10));
    let limit = read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|text| text.trim().parse().ok());
    let limit =
        limit.map_or_else(String::new, |bytes| format!("; limited to {} by a cgroup", gib(bytes)));
    row("memory", &kib("MemAvailable:"), format!("available of {}{limit}", kib("MemTotal:")))
}

fn socket_dir() -> Result<String, String> {
    let dir = std::env::var_os("SYMMEM_SOCKET_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    match access(&dir, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => Ok(format!("{} can be written", dir.display())),
        Err(error) => {
            Err(format!("{} cannot be written: {error}; set SYMMEM_SOCKET_DIR", dir.display()))
        }
    }
}

fn descriptors() -> Row {
    let limit = getrlimit(Resource::Nofile);
    let text = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
    let details = format!("may be raised to {} (ulimit -n)", text(limit.maximum));
    row("descriptors per process", &text(limit.current), details)
}

fn huge_pages() -> Row {
    let read = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        read_to_string(path).map_or_else(|_| "0".to_owned(), |text| text.trim().to_owned())
    };
    let details = format!("of 2 MiB reserved, {} of them free; not needed", read("free_hugepages"));
    row("huge pages", &read("nr_hugepages"), details)
}

fn transparent_huge_pages() -> Result<String, String> {
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let text = read_to_string(SETTING).map_err(|error| format!("{SETTING}: {error}"))?;
    let chosen = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
    match chosen.unwrap_or(text.trim()) {
        mode @ ("never" | "deny") => Err(format!(
            "for shared memory: {mode}; not needed, but large buffers are faster after: echo advise > {SETTING}"
        )),
        mode => Ok(format!("for shared memory: {mode}")),
    }
}
