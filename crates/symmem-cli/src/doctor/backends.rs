//! Which backends can work here.

use symmem::nccl::{Feature, Nccl};
use symmem_sys::cuda::{self, Driver};
use symmem_sys::nvshmem::Nvshmem;
use symmem_sys::{Found, Library, probe};

use super::{Row, checked, machine};
use crate::topo;

/// One row per backend.
pub(super) fn rows() -> Vec<Row> {
    let cuda = cuda();
    let needs_cuda = |found| match (found, &cuda) {
        (Ok(text), Ok(_)) => Ok(text),
        (Ok(text), Err(_)) => Err(format!("{text}; needs cuda, which does not work: see there")),
        (Err(missing), Ok(_)) => Err(missing),
        (Err(missing), Err(_)) => Err(format!("{missing}; also needs cuda")),
    };
    let process = "ranks as threads of one process; nothing is needed".to_owned();
    let host = machine::sealed_memfd().map(|()| "ranks as processes on one host".to_owned());
    vec![
        checked("process", Ok(process)),
        checked("host", host),
        checked("cuda", cuda.clone()),
        checked("nccl", needs_cuda(nccl())),
        checked("nvshmem", needs_cuda(nvshmem())),
    ]
}

/// Asks the driver, and every device for memory that can be shared. No context is made on any.
fn cuda() -> Result<String, String> {
    let text = found(Library::Cuda)?;
    let driver = cuda::load().map_err(|missing| missing.to_string())?;
    let devices = shareable(&*driver).map_err(|why| format!("{text}, but {why}"))?;
    let management = found(Library::Nvml).unwrap_or_else(|missing| missing);
    Ok(format!("{devices}; {text}; {management}; see symmem topo"))
}

/// Where the library is, which version, and what that has.
fn nccl() -> Result<String, String> {
    let text = found(Library::Nccl)?;
    let nccl = Nccl::load().map_err(|error| error.to_string())?;
    let (has, lacks): (Vec<_>, Vec<_>) =
        Feature::ALL.into_iter().partition(|feature| nccl.has(*feature));
    let has = has.into_iter().map(|feature| feature.name().to_owned());
    let lacks = lacks.into_iter().map(|feature| {
        let (major, minor) = feature.since();
        format!("no {} (from {major}.{minor} on)", feature.name())
    });
    let features: Vec<String> =
        ["communicators".to_owned()].into_iter().chain(has).chain(lacks).collect();
    Ok(format!("{text}: {}", features.join(", ")))
}

/// Where the library is, which version, and what that lacks. It is not initialised.
fn nvshmem() -> Result<String, String> {
    let text = found(Library::Nvshmem)?;
    let library = Nvshmem::open().map_err(|missing| missing.to_string())?;
    let (major, minor, patch) = library.version().map_err(|failure| failure.to_string())?;
    let text = text.replace("of unknown version", &format!("{major}.{minor}.{patch}"));
    match library.missing().as_slice() {
        [] => Ok(format!("{text}: a heap, teams, operations in streams")),
        lacks => Err(format!("{text} lacks {}", lacks.join(", "))),
    }
}

/// How many devices there are, and which of them cannot be used, and why.
fn shareable(driver: &dyn Driver) -> Result<String, String> {
    driver.init().map_err(|failure| failure.to_string())?;
    let count = driver.device_count().map_err(|failure| failure.to_string())?;
    let fault = |number: usize| {
        let trial = match driver.device(number) {
            Ok(device) => topo::can_be_shared(driver, device),
            Err(failure) => return Some(format!("cuda:{number}: {failure}")),
        };
        (!trial.works()).then(|| format!("cuda:{number}: {}", trial.why()))
    };
    let faults: Vec<String> = (0..count).filter_map(fault).collect();
    match (count, faults.len()) {
        (0, _) => Err("this process sees no device".to_owned()),
        (_, 0) => Ok(format!("{count} GPU(s)")),
        (_, faulty) if faulty == count => Err(faults.join("; ")),
        _ => Ok(format!("{count} GPU(s), of which not all work: {}", faults.join("; "))),
    }
}

/// Where a library is and which version, or what was looked for.
pub(super) fn found(library: Library) -> Result<String, String> {
    match probe(library) {
        Ok(Found { soname, path, version }) => {
            let version = version.unwrap_or_else(|| "of unknown version".to_owned());
            let path = path.map_or_else(|| soname, |path| path.display().to_string());
            Ok(format!("{} {version} ({path})", library.name()))
        }
        Err(missing) => Err(format!("{missing} (looked for {})", missing.looked_for.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use symmem_sys::cuda::code;
    use symmem_sys::cuda::fake::{Config, Fake};

    use super::*;

    #[test]
    fn what_is_missing_for_cuda_is_said_exactly() {
        assert_eq!(shareable(&*Fake::plain(2)), Ok("2 GPU(s)".to_owned()));
        assert_eq!(shareable(&*Fake::plain(0)), Err("this process sees no device".to_owned()));

        let none = Fake::plain(1);
        none.fail_always("cuInit", code::NO_DEVICE);
        assert!(shareable(&*none).unwrap_err().contains("CUDA_ERROR_NO_DEVICE"));

        let old = Config { virtual_memory: false, ..Config::default() };
        let why = shareable(&*Fake::new(vec![old.clone()])).unwrap_err();
        assert_eq!(why, "cuda:0: the device has no virtual memory management");
        let both = shareable(&*Fake::new(vec![Config::default(), old])).unwrap();
        assert!(both.starts_with("2 GPU(s), of which not all work: cuda:1: "), "{both}");

        let closed = Fake::plain(1);
        closed.fail_always("cuMemExportToShareableHandle", code::NOT_PERMITTED);
        let why = shareable(&*closed).unwrap_err();
        assert!(why.contains("cuMemExportToShareableHandle failed"), "{why}");
        assert_eq!(closed.live(), Vec::<String>::new());
    }
}
