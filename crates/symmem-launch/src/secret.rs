//! The secret of a job, which its ranks read from a file.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::rand::{GetRandomFlags, getrandom};

/// The names under which the user may have given one.
const NAMES: [&str; 2] = ["SYMMEM_SECRET", FILE];
const FILE: &str = "SYMMEM_SECRET_FILE";
/// What the library accepts.
const SHORTEST: u64 = 16;

/// With what ranks seal what they write to the store, and encrypt what they send to other hosts.
#[derive(Clone, Debug)]
pub enum Secret {
    /// What the environment says, if anything.
    Inherited,
    /// The launcher's own, in memory that has the name of a file as long as the launcher lives.
    Own(Arc<OwnedFd>),
    /// In this file.
    File(PathBuf),
}

impl Secret {
    /// A random one, unless the user has given one.
    pub(super) fn own() -> Self {
        // Without it the store is as open as one that has no secret.
        if is_given() { Self::Inherited } else { make().map_or(Self::Inherited, Self::Own) }
    }

    /// In a file that nobody else may read.
    pub(super) fn file(path: &Path) -> Result<Self> {
        let named = || format!("--secret-file {}", path.display());
        let about = std::fs::metadata(path).with_context(named)?;
        let mode = about.permissions().mode() & 0o777;
        ensure!(
            about.is_file() && mode & 0o077 == 0,
            "{} has to be a file with mode 0600, not {mode:04o}",
            named()
        );
        ensure!(about.size() >= SHORTEST, "{} has less than {SHORTEST} bytes", named());
        Ok(Self::File(path.canonicalize().with_context(named)?))
    }

    /// Tells a rank.
    pub(super) fn tell(&self, command: &mut Command) {
        let path = match self {
            Self::Inherited => return,
            Self::Own(fd) => format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into(),
            Self::File(path) => path.clone(),
        };
        command.env_remove("SYMMEM_SECRET").env(FILE, path);
    }

    /// Whether ranks have one.
    pub(super) fn is_there(&self) -> bool {
        !matches!(self, Self::Inherited) || is_given()
    }
}

fn is_given() -> bool {
    NAMES.map(std::env::var_os).iter().flatten().any(|value| !value.is_empty())
}

fn make() -> Option<Arc<OwnedFd>> {
    let mut bytes = [0; 16];
    getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("symmem-secret", flags).ok()?;
    fchmod(&fd, Mode::RUSR | Mode::WUSR).ok()?;
    let mut file = std::fs::File::from(fd);
    file.write_all(text.as_bytes()).ok()?;
    let fd = OwnedFd::from(file);
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&fd, seals).ok()?;
    Some(Arc::new(fd))
}
