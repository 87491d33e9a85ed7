//! Which backends can work here.

use symmem_sys::{Found, Library, probe};

use super::{Row, checked, machine};

/// One row per backend.
pub(super) fn rows() -> Vec<Row> {
    let cuda = cuda();
    let needs_cuda = |library| match (found(library), &cuda) {
        (Ok(text), Ok(_)) => Ok(text),
        (Ok(text), Err(_)) => Err(format!("{text} needs cuda, which does not work: see there")),
        (Err(missing), Ok(_)) => Err(missing),
        (Err(missing), Err(_)) => Err(format!("{missing}; also needs cuda")),
    };
    let process = "ranks as threads of one process; nothing is needed".to_owned();
    let host = machine::sealed_memfd().map(|()| "ranks as processes on one host".to_owned());
    vec![
        checked("process", Ok(process)),
        checked("host", host),
        checked("cuda", cuda.clone()),
        checked("nccl", needs_cuda(Library::Nccl)),
        checked("nvshmem", needs_cuda(Library::Nvshmem)),
        checked("ucx", found(Library::Ucx)),
    ]
}

fn cuda() -> Result<String, String> {
    let driver = found(Library::Cuda)?;
    let management = found(Library::Nvml).unwrap_or_else(|missing| missing);
    match gpus() {
        0 => Err(format!("{driver}, but there is no GPU: no /dev/nvidia0, /dev/nvidia1, …")),
        count => Ok(format!("{count} GPU(s); {driver}; {management}")),
    }
}

/// Counted by their device files, because asking the driver would initialise it.
fn gpus() -> usize {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_gpu =
        |name: &String| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    names.filter(is_gpu).count()
}

fn found(library: Library) -> Result<String, String> {
    match probe(library) {
        Ok(Found { soname, path, version }) => {
            let version = version.unwrap_or_else(|| "of unknown version".to_owned());
            let path = path.map_or_else(|| soname.to_owned(), |path| path.display().to_string());
            Ok(format!("{} {version} ({path})", library.name()))
        }
        Err(missing) => Err(format!("{missing} (looked for {})", missing.looked_for.join(", "))),
    }
}
