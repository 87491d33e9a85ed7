//! The socket file at which a rank waits for its peers: private, short-lived, and removed by whoever can.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::{Error, Result};

const PREFIX: &str = "symmem-";
/// The name of the socket in a private directory.
const NAME: &str = "s";
/// Leftovers of crashed jobs are removed when older than this; younger ones may be about to be used.
const STALE: Duration = Duration::from_secs(60);

pub(super) struct Endpoint {
    listener: OwnedFd,
    path: PathBuf,
}

impl Endpoint {
    /// Listens in `shared`, or in a new directory that only this user may enter.
    pub(super) fn open(shared: Option<&Path>) -> Result<Self> {
        let name = format!("{PREFIX}{:032x}", random()?);
        let path = match shared {
            Some(dir) => {
                sweep(dir);
                dir.join(name)
            }
            None => {
                let base = base_dir();
                sweep(&base);
                let dir = base.join(name);
                let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
                made.map_err(Error::system(format!("creating {}", dir.display())))?;
                dir.join(NAME)
            }
        };
        listen(&path)
            .map(|listener| Self { listener, path: path.clone() })
            .inspect_err(|_| remove(&path))
    }

    pub(super) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The next waiting connection.
    pub(super) fn accept(&self) -> Result<OwnedFd, Errno> {
        net::accept_with(&self.listener, SocketFlags::CLOEXEC)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn base_dir() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("XDG_RUNTIME_DIR")
        .filter(|dir| dir.is_dir())
        .or_else(|| set("TMPDIR"))
        .unwrap_or_else(|| "/tmp".into())
}

fn listen(path: &Path) -> Result<OwnedFd> {
    let address = SocketAddrUnix::new(path).map_err(|_| Error::Usage {
        op: "connect",
        rank: None,
        expected: "a socket directory whose path leaves room for a name (108 bytes in all)".into(),
        got: format!("{} bytes: {}; set SYMMEM_SOCKET_DIR", path.as_os_str().len(), path.display()),
    })?;
    let at = |call: &str| Error::system(format!("{call} {}", path.display()));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(Error::system("socket"))?;
    net::bind(&socket, &address).map_err(at("binding"))?;
    net::listen(&socket, 4096).map_err(at("listening at"))?;
    Ok(socket)
}

/// Connects without waiting: a full queue is `AGAIN`.
pub(super) fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Removes a socket file, and its directory if it was a private one.
pub(super) fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
    if path.file_name().is_some_and(|n| n == NAME) {
        let _ = path.parent().map(std::fs::remove_dir);
    }
}

/// Removes what crashed jobs of ours left behind.
fn sweep(dir: &Path) {
    let user = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        if metadata.uid() != user || !is_old(&metadata) {
            continue;
        }
        // Whatever else begins alike is somebody's. Of sockets, stores have names of another kind.
        if metadata.file_type().is_socket() {
            remove_if_dead(&entry.path());
        } else if metadata.is_dir() && is_number(rest) {
            remove_if_dead(&entry.path().join(NAME));
        }
    }
}

/// As in the names that `Endpoint::open` gives.
fn is_number(rest: &str) -> bool {
    rest.len() == 32 && rest.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Removes the socket file of an owner that is gone.
pub(super) fn remove_if_dead(path: &Path) {
    if let Err(Errno::CONNREFUSED | Errno::NOENT) = connect(path) {
        tracing::info!("removing {}, whose owner is gone", path.display());
        remove(path);
    }
}

fn is_old(metadata: &std::fs::Metadata) -> bool {
    let age = metadata.modified().ok().and_then(|t| t.elapsed().ok());
    age.is_some_and(|age| age > STALE)
}

/// 128 random bits from the kernel.
pub(crate) fn random() -> Result<u128> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::system("getrandom"))?;
    Ok(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("{name}-{:x}", random().unwrap()));
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn nothing_is_left_of_an_endpoint() {
        let dir = scratch("endpoint");
        let endpoint = Endpoint::open(Some(&dir)).unwrap();
        assert!(connect(endpoint.path()).is_ok());
        drop(endpoint);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        std::fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn stale_sockets_are_swept_and_all_else_is_kept() {
        let dir = scratch("sweep");
        let name = |digit: &str| format!("{PREFIX}{}", digit.repeat(32));
        let stale = dir.join(name("0"));
        drop(listen(&stale).unwrap());
        let live = dir.join(name("1"));
        let _listening = listen(&live).unwrap();
        let store = dir.join(format!("{PREFIX}store-0-1-2"));
        drop(listen(&store).unwrap());
        let private = dir.join(name("2"));
        std::fs::create_dir(&private).unwrap();
        drop(listen(&private.join(NAME)).unwrap());
        // Files of the user's that only look alike.
        let notes = dir.join(format!("{PREFIX}notes"));
        let digits = dir.join(name("3"));
        [&notes, &digits].iter().for_each(|path| std::fs::write(path, "mine").unwrap());
        let folder = dir.join(format!("{PREFIX}folder"));
        std::fs::create_dir(&folder).unwrap();
        let long_ago = to_timespec(std::time::SystemTime::now() - 2 * STALE);
        let times = rustix::fs::Timestamps { last_access: long_ago, last_modification: long_ago };
        let kept = [&live, &notes, &digits, &folder];
        for path in kept.into_iter().chain([&stale, &store, &private]) {
            let none = rustix::fs::AtFlags::empty();
            rustix::fs::utimensat(rustix::fs::CWD, path, &times, none).unwrap();
        }
        sweep(&dir);
        assert!(!stale.exists() && !store.exists() && !private.exists());
        assert!(kept.iter().all(|path| path.exists()), "{kept:?}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    fn to_timespec(t: std::time::SystemTime) -> rustix::fs::Timespec {
        let since = t.duration_since(std::time::UNIX_EPOCH).unwrap();
        rustix::fs::Timespec { tv_sec: since.as_secs() as i64, tv_nsec: 0 }
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_with_the_remedy() {
        let deep = PathBuf::from(format!("/{}", "d".repeat(120)));
        let e = listen(&deep).unwrap_err().to_string();
        assert!(e.contains("SYMMEM_SOCKET_DIR"), "{e}");
    }
}
