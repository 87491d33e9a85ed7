//! NCCL's own communicators: collectives of devices that need no symmetric memory, over NVLink, PCI or a network.
//!
//! The library is looked for when it is first needed, also in Python packages; `SYMMEM_NCCL` names the file. A call puts work
//! into a stream. Nothing waits for ever: communicators do not block, and what does not get ready by its deadline is aborted,
//! on this rank; that names the operation and the ranks that were waited for.
//!
//! ```no_run
//! use symmem::nccl::Nccl;
//! use symmem::{ReduceOp, World, cuda::Gpu};
//!
//! let world = World::from_env()?;
//! let gpu = Gpu::open(world.local_rank() as u32)?;
//! let communicator = Nccl::load()?.of_group(&world, &gpu)?; // the ranks tell each other the id
//! let stream = gpu.stream()?;
//! let mut x = gpu.alloc::<f32>(&world, 1 << 20)?;
//! communicator.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &stream)?;
//! communicator.synchronize(&stream)?; // with a deadline, and an eye on the other ranks
//! # Ok::<(), symmem::Error>(())
//! ```

mod calls;
mod communicator;
mod elements;
mod forming;
mod group;
mod registered;
mod rounds;
mod windows;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use symmem_sys::nccl as sys;

pub use communicator::Communicator;
pub use elements::{Operator, ScaledSum, Source, Target};
pub use registered::{Registration, Window};
pub(crate) use windows::register_windows;
pub use windows::{External, Windowed};

use crate::error::{Error, Result};

/// Has the library looked for in this folder of Python packages too, where it is not loaded yet.
pub fn look_in(folder: PathBuf) {
    symmem_sys::look_in(folder);
}

/// The library. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Nccl(Arc<sys::Nccl>);

/// A version of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Version {
    /// As in 2.28.9: 2.
    pub major: i32,
    /// 28.
    pub minor: i32,
    /// 9.
    pub patch: i32,
    /// What the name of the file says besides, such as a candidate's number; most have none.
    pub suffix: Option<String>,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let suffix = self.suffix.as_deref().unwrap_or("");
        write!(f, "{}.{}.{}{suffix}", self.major, self.minor, self.patch)
    }
}

/// What a version of the library can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Feature {
    /// Windows onto memory of all ranks, and communicators that shrink: 2.27.
    Windows,
    /// Access to windows by kernels: 2.28.
    DeviceAccess,
    /// Signals, and addresses of peers: 2.29.
    Signals,
}

impl Feature {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Windows, Self::DeviceAccess, Self::Signals];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Windows => "windows",
            Self::DeviceAccess => "device access",
            Self::Signals => "signals",
        }
    }

    /// The first version that has it, as its first two numbers.
    pub const fn since(self) -> (i32, i32) {
        let version = match self {
            Self::Windows => sys::WINDOWS,
            Self::DeviceAccess => sys::DEVICE_ACCESS,
            Self::Signals => sys::SIGNALS,
        };
        (version.major, version.minor)
    }
}

impl Nccl {
    /// The table of its functions.
    pub(crate) fn library(&self) -> &sys::Nccl {
        &self.0
    }

    /// The library of this machine.
    pub fn load() -> Result<Self> {
        sys::load().map(Self).map_err(unavailable)
    }

    /// The library in this file.
    pub fn open(file: impl AsRef<Path>) -> Result<Self> {
        sys::Nccl::open(file.as_ref()).map(|nccl| Self(Arc::new(nccl))).map_err(unavailable)
    }

    /// Its version.
    pub fn version(&self) -> Version {
        let sys::Version { major, minor, patch } = self.0.version();
        let suffix = self.path().and_then(|path| suffix(&path, self.0.version()));
        Version { major, minor, patch, suffix }
    }

    /// Its file.
    pub fn path(&self) -> Option<PathBuf> {
        self.0.path()
    }

    /// Whether its version has this.
    pub fn has(&self, feature: Feature) -> bool {
        let (major, minor) = feature.since();
        self.0.has(sys::Version::new(major, minor, 0))
    }

    /// What the ranks of a new communicator find each other by: made by one, and given to the others.
    pub fn unique_id(&self) -> Result<UniqueId> {
        self.0.unique_id().map(UniqueId).map_err(|failure| failed("unique_id", None, &failure))
    }
}

/// Of `libnccl.so.2.28.9rc1`: `rc1`. The library itself does not tell.
fn suffix(file: &Path, version: sys::Version) -> Option<String> {
    let (_, text) = file.file_name()?.to_str()?.split_once(".so.")?;
    let rest = text.strip_prefix(&version.to_string())?;
    let suffix = !rest.is_empty() && !rest.starts_with(|c: char| c.is_ascii_digit());
    suffix.then(|| rest.to_owned())
}

/// What the ranks of a communicator find each other by: 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId(sys::UniqueId);

impl UniqueId {
    /// From the bytes that another rank has sent.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let id = bytes
            .try_into()
            .map_err(|_| Error::usage("unique_id", "128 bytes", bytes.len().to_string()))?;
        Ok(Self(sys::UniqueId(id)))
    }

    /// The bytes, for the other ranks.
    pub fn as_bytes(&self) -> &[u8; 128] {
        &self.0.0
    }
}

fn unavailable(missing: symmem_sys::Missing) -> Error {
    let why = format!("{missing}; its path can be given by SYMMEM_NCCL");
    Error::unavailable("NCCL", why)
}

/// Logs a failure of what nobody waits for.
pub(crate) fn warn(done: Result<std::result::Result<(), sys::Failure>>) {
    match done {
        Ok(Err(failure)) if !failure.is_in_progress() => tracing::warn!("{failure}"),
        Err(e) => tracing::warn!("{e}"),
        Ok(_) => {}
    }
}

/// The library's failure, as an error of this library.
pub(crate) fn failed(op: &'static str, rank: Option<usize>, failure: &sys::Failure) -> Error {
    if failure.is_unsupported() {
        return Error::unavailable(op, failure.to_string());
    }
    let rank = rank.map_or(String::new(), |rank| format!("rank {rank}: "));
    let sys::Failure { call, code, text, last } = failure;
    let last = if last.is_empty() { String::new() } else { format!(": {last}") };
    let why = format!("{rank}{op}: NCCL Error {code}: {text} ({call}){last}");
    Error::Driver { library: "NCCL", call, code: Some(*code), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_128_bytes() {
        let error = UniqueId::from_bytes(&[0; 127]).unwrap_err();
        assert_eq!(error.to_string(), "unique_id: expected 128 bytes, got 127");
        let id = UniqueId::from_bytes(&[7; 128]).unwrap();
        assert_eq!(id.as_bytes(), &[7; 128]);
    }

    #[test]
    fn a_suffix_is_what_follows_the_version_in_the_files_name() {
        let of = |name: &str| suffix(Path::new(name), sys::Version::new(2, 28, 9));
        assert_eq!(of("/lib/libnccl.so.2.28.9rc1").as_deref(), Some("rc1"));
        assert_eq!(of("/lib/libnccl.so.2.28.9"), None);
        assert_eq!(of("/lib/libnccl.so.2.28.91"), None);
        assert_eq!(of("/lib/libnccl.so.2"), None);
    }

    #[test]
    fn a_failure_names_rank_operation_and_code() {
        let failure = sys::Failure {
            call: "ncclAllReduce",
            code: 4,
            text: "invalid argument".into(),
            last: String::new(),
        };
        let text = failed("all_reduce", Some(3), &failure).to_string();
        let expected = "rank 3: all_reduce: NCCL Error 4: invalid argument (ncclAllReduce)";
        assert_eq!(text, expected);
    }
}
