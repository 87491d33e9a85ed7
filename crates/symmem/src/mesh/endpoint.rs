//! The socket at which a rank waits for its peers, in a directory that only this user may enter.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::{Error, Result};
use crate::private::{self, Directory, SocketFile};

const PREFIX: &str = "symmem-";
/// The name of the socket in its directory.
const NAME: &str = "s";
const KIND: SocketType = SocketType::SEQPACKET;
/// Leftovers of crashed jobs are removed when older than this; younger ones may be about to be used.
const STALE: Duration = Duration::from_secs(60);
/// How many leftovers, or what looks like them, one rank looks at.
const SWEPT_AT_ONCE: usize = 256;

pub(super) struct Endpoint {
    listener: OwnedFd,
    path: PathBuf,
    file: Option<SocketFile>,
    directory: Directory,
}

impl Endpoint {
    /// Listens in a new directory that only this user may enter: in `shared`, or where files of a run belong.
    pub(super) fn open(shared: Option<&Path>) -> Result<Self> {
        let base = shared.map_or_else(private::base, |dir| {
            std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned())
        });
        sweep(&base);
        let dir = base.join(format!("{PREFIX}{:032x}", random()?));
        let path = dir.join(NAME);
        check_length(&path)?;
        let directory = Directory::create_private(&dir)
            .map_err(Error::system(format!("creating the private directory {}", dir.display())))?;
        match directory.listen(OsStr::new(NAME), KIND) {
            Ok((listener, file)) => Ok(Self { listener, path, file: Some(file), directory }),
            Err(e) => {
                directory.remove();
                Err(Error::system(format!("listening at {}", path.display()))(e))
            }
        }
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
        drop(self.file.take());
        self.directory.remove();
    }
}

/// Peers connect by the whole path.
fn check_length(path: &Path) -> Result<()> {
    SocketAddrUnix::new(path).map(drop).map_err(|_| Error::Usage {
        op: "connect",
        rank: None,
        expected: "a socket directory whose path leaves room for a name (108 bytes in all)".into(),
        got: format!("{} bytes: {}; set SYMMEM_SOCKET_DIR", path.as_os_str().len(), path.display()),
    })
}

/// Connects without waiting: a full queue is `AGAIN`. The path may come from anybody, so it must be one that `Endpoint::open`
/// makes, in a private directory of this user; everything else is `PERM`.
pub(super) fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let dir = path.parent().filter(|dir| is_ours(path, dir)).ok_or(Errno::PERM)?;
    Directory::open_private(dir)?.connect(OsStr::new(NAME), KIND)
}

fn is_ours(path: &Path, dir: &Path) -> bool {
    path.is_absolute()
        && path.file_name().is_some_and(|name| name == NAME)
        && dir.file_name().is_some_and(is_name)
}

/// As in the names that `Endpoint::open` gives.
fn is_name(name: &OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    number.is_some_and(|n| n.len() == 32 && n.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Removes what crashed jobs of ours left behind.
fn sweep(base: &Path) {
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_name(&entry.file_name())).take(SWEPT_AT_ONCE) {
        let Ok(directory) = Directory::open_private(&entry.path()) else { continue };
        if directory.age().is_some_and(|age| age > STALE) {
            if directory.remove_stale_socket(OsStr::new(NAME), KIND, false) {
                tracing::info!("removed {}, whose owner is gone", directory.path().display());
            }
            // Only if nothing else is in it.
            directory.remove();
        }
    }
}

/// 128 random bits from the kernel.
pub(crate) fn random() -> Result<u128> {
    private::random().map_err(Error::system("getrandom"))
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

    /// A directory as a crashed rank leaves it.
    fn leave(dir: &Path, digit: &str) -> PathBuf {
        let path = dir.join(format!("{PREFIX}{}", digit.repeat(32)));
        let directory = Directory::create_private(&path).unwrap();
        std::mem::forget(directory.listen(OsStr::new(NAME), KIND).map(|(_, file)| file));
        path
    }

    #[test]
    fn stale_sockets_are_swept_and_all_else_is_kept() {
        let dir = scratch("sweep");
        let (stale, young) = (leave(&dir, "0"), leave(&dir, "1"));
        let live = dir.join(format!("{PREFIX}{}", "2".repeat(32)));
        let live_directory = Directory::create_private(&live).unwrap();
        let _live = live_directory.listen(OsStr::new(NAME), KIND).unwrap();
        // What only looks alike: a file as the socket, a link as the directory or in it, other names, others' files with it.
        let file = dir.join(format!("{PREFIX}{}", "3".repeat(32)));
        Directory::create_private(&file).unwrap();
        std::fs::write(file.join(NAME), "mine").unwrap();
        let notes = dir.join(format!("{PREFIX}notes"));
        std::fs::write(&notes, "mine").unwrap();
        let linked = dir.join("linked");
        std::fs::rename(leave(&dir, "4"), &linked).unwrap();
        std::os::unix::fs::symlink(&linked, dir.join(format!("{PREFIX}{}", "4".repeat(32))))
            .unwrap();
        let open = leave(&dir, "5");
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&open, permissions).unwrap();
        for path in [&stale, &live, &file, &linked, &open] {
            make_old(path);
        }
        sweep(&dir);
        assert!(!stale.exists());
        for kept in [young, live, file, linked, open].map(|path| path.join(NAME)) {
            assert!(kept.exists(), "{}", kept.display());
        }
        assert!(notes.exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    fn make_old(path: &Path) {
        let then = std::time::SystemTime::now() - 2 * STALE;
        let since = then.duration_since(std::time::UNIX_EPOCH).unwrap();
        let then = rustix::fs::Timespec { tv_sec: since.as_secs() as i64, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
        let none = rustix::fs::AtFlags::empty();
        rustix::fs::utimensat(rustix::fs::CWD, path, &times, none).unwrap();
    }

    #[test]
    fn a_path_that_no_rank_makes_is_not_connected_to() {
        let dir = scratch("planted");
        let endpoint = Endpoint::open(Some(&dir)).unwrap();
        let link = dir.join(format!("{PREFIX}{}", "a".repeat(32)));
        std::os::unix::fs::symlink(endpoint.path().parent().unwrap(), &link).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(dir.join("other")).unwrap();
        for path in [link.join(NAME), dir.join("other"), "s".into(), "/".into(), "".into()] {
            assert!(connect(&path).is_err(), "{}", path.display());
        }
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "somebody has connected to a socket of another kind");
        drop(endpoint);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_with_the_remedy() {
        let deep = std::env::temp_dir().join("d".repeat(120));
        let e = Endpoint::open(Some(&deep)).err().unwrap().to_string();
        assert!(e.contains("SYMMEM_SOCKET_DIR"), "{e}");
    }
}
