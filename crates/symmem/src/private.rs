//! What only this user can reach: private directories, socket files that are removed by their creators, and the user at
//! the other end of a Unix socket.
//!
//! Nothing is removed by path alone. A directory is held open and checked (owner, mode, no symbolic link), and a file in it
//! is removed only if it is the socket that was bound there, by device and inode, or a socket of ours that nobody serves.
#![allow(unsafe_code)] // one socket option that rustix has no sound call for

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// How many clients may be waiting to be accepted.
const BACKLOG: i32 = 4096;
/// A socket is refused between `bind` and `listen` as well; nobody takes this long from one to the other.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity(u64, u64);

impl Identity {
    fn of(stat: &Stat) -> Self {
        Self(stat.st_dev, stat.st_ino)
    }
}

/// This process's user.
pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether to talk to a process of this user: our own, or the system's, who could read our memory anyway.
pub(crate) fn is_trusted(uid: u32) -> bool {
    uid == user() || uid == 0
}

/// A directory that is held open: what happens to its path later does not matter.
pub(crate) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// The directory at `path`, wherever that leads.
    pub(crate) fn open(path: &Path) -> Result<Self, Errno> {
        Self::open_with(path, OFlags::empty())
    }

    fn open_with(path: &Path, flags: OFlags) -> Result<Self, Errno> {
        let flags = flags | OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// A directory of this user at `path` that nobody else may enter. A symbolic link is refused, and so is a directory of
    /// somebody else or with other permissions.
    pub(crate) fn open_private(path: &Path) -> Result<Self, Errno> {
        let directory = Self::open_with(path, OFlags::NOFOLLOW)?;
        if directory.excludes(0o077) { Ok(directory) } else { Err(Errno::PERM) }
    }

    /// Makes a private directory at `path`, where there is nothing yet.
    pub(crate) fn create_private(path: &Path) -> Result<Self, Errno> {
        fs::mkdir(path, Mode::RWXU)?;
        Self::open_private(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is ours, and everybody else lacks all of these permissions.
    fn excludes(&self, permissions: u32) -> bool {
        let stat = fs::fstat(&self.fd);
        stat.is_ok_and(|stat| stat.st_uid == user() && stat.st_mode & permissions == 0)
    }

    /// The time since something was last created or removed in it.
    pub(crate) fn age(&self) -> Option<Duration> {
        let changed = fs::fstat(&self.fd).ok()?.st_mtime;
        let changed = std::time::UNIX_EPOCH + Duration::from_secs(changed.try_into().ok()?);
        changed.elapsed().ok()
    }

    fn stat(&self, name: &OsStr) -> Option<Stat> {
        fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// A path to `name` in this very directory.
    fn at(&self, name: &OsStr) -> PathBuf {
        Path::new("/proc/self/fd").join(self.fd.as_raw_fd().to_string()).join(name)
    }

    /// Connects to the socket `name` without waiting: a full queue is `AGAIN`.
    pub(crate) fn connect(&self, name: &OsStr, kind: SocketType) -> Result<OwnedFd, Errno> {
        connect(&self.at(name), kind)
    }

    /// Listens at a new socket `name`, without blocking.
    pub(crate) fn listen(
        &self,
        name: &OsStr,
        kind: SocketType,
    ) -> Result<(OwnedFd, SocketFile), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        let directory = fs::openat(&self.fd, ".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        net::bind(&socket, &SocketAddrUnix::new(self.at(name))?)?;
        // Bound by us a moment ago, and so ours: others may have removed it, if the directory is theirs too.
        let stat = self.stat(name).filter(is_our_socket).ok_or(Errno::NOENT)?;
        let file = SocketFile {
            directory,
            name: name.to_owned(),
            identity: Identity::of(&stat),
            process: std::process::id(),
        };
        net::listen(&socket, BACKLOG)?;
        Ok((socket, file))
    }

    /// Removes a socket that a process of ours left behind when it crashed. It must be ours, nobody may serve it, and nobody
    /// else may be able to put files here. What is `young` may be on its way from `bind` to `listen`, and is looked at twice.
    pub(crate) fn remove_stale_socket(&self, name: &OsStr, kind: SocketType, young: bool) -> bool {
        let Some(stat) = self.stat(name).filter(is_our_socket) else { return false };
        let is_refused = || matches!(self.connect(name, kind), Err(Errno::CONNREFUSED));
        if !self.excludes(0o022) || !is_refused() {
            return false;
        }
        if young {
            std::thread::sleep(LOOK_AGAIN);
        }
        let is_same = self.stat(name).is_some_and(|now| Identity::of(&now) == Identity::of(&stat));
        is_same && is_refused() && fs::unlinkat(&self.fd, name, AtFlags::empty()).is_ok()
    }

    /// Removes the directory itself, if its path still leads to it and it is empty.
    pub(crate) fn remove(&self) {
        let now = fs::statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW);
        if let (Ok(now), Ok(held)) = (now, fs::fstat(&self.fd))
            && Identity::of(&now) == Identity::of(&held)
        {
            let _ = fs::rmdir(&self.path);
        }
    }
}

fn is_our_socket(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Socket && stat.st_uid == user()
}

/// The file of a socket that this process has bound; removed with it.
pub(crate) struct SocketFile {
    directory: OwnedFd,
    name: OsString,
    identity: Identity,
    /// A fork has a copy of this value, and the file is not its own.
    process: u32,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let now = fs::statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        let is_same = now.is_ok_and(|now| Identity::of(&now) == self.identity);
        if is_same && self.process == std::process::id() {
            let _ = fs::unlinkat(&self.directory, &self.name, AtFlags::empty());
        }
    }
}

/// Connects to the socket at `path` without waiting: a full queue is `AGAIN`.
pub(crate) fn connect(path: &Path, kind: SocketType) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Where files of a run belong: `XDG_RUNTIME_DIR`, or the directory for temporary ones.
pub(crate) fn base() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let runtime = set("XDG_RUNTIME_DIR").filter(|dir| dir.is_dir());
    let base = runtime.or_else(|| set("TMPDIR")).unwrap_or_else(|| "/tmp".into());
    std::path::absolute(&base).unwrap_or(base)
}

/// The one directory of this user's jobs: known to all of them, and closed to everybody else.
pub(crate) fn own_directory() -> io::Result<Directory> {
    let path = base().join(format!("symmem-{}", user()));
    match fs::mkdir(&path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    Directory::open_private(&path).map_err(|e| {
        let why = format!("{} is not a directory of this user with mode 0700: {e}", path.display());
        io::Error::new(io::ErrorKind::PermissionDenied, why)
    })
}

/// The user at the other end of a Unix socket; for a connection that was accepted, when it was made.
pub(crate) fn peer_user(socket: impl AsFd) -> Option<u32> {
    // Not rustix's call: across pid namespaces the kernel reports pid 0, which its type cannot hold.
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `cred` is a plain struct of the length given, and the descriptor is open.
    let answer = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    (answer == 0).then_some(cred.uid)
}

/// 128 random bits from the kernel.
pub(crate) fn random() -> Result<u128, Errno> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: SocketType = SocketType::STREAM;

    /// A private directory, as tests need it, with its path.
    fn scratch() -> (Directory, PathBuf) {
        let path = std::env::temp_dir().join(format!("private-{:x}", random().unwrap()));
        (Directory::create_private(&path).unwrap(), path)
    }

    fn name(text: &str) -> &OsStr {
        OsStr::new(text)
    }

    #[test]
    fn a_socket_goes_with_its_file_and_a_file_put_in_its_place_stays() {
        let (directory, path) = scratch();
        drop(directory.listen(name("s"), KIND).unwrap());
        assert!(!path.join("s").exists());
        let bound = directory.listen(name("s"), KIND).unwrap();
        std::fs::remove_file(path.join("s")).unwrap();
        std::fs::write(path.join("s"), "mine").unwrap();
        drop(bound);
        assert_eq!(std::fs::read(path.join("s")).unwrap(), b"mine");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_directory_moved_away_keeps_its_socket_file_and_no_other_loses_one() {
        let (directory, path) = scratch();
        let (_listener, file) = directory.listen(name("s"), KIND).unwrap();
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("s"), "mine").unwrap();
        drop(file);
        directory.remove();
        assert!(!moved.join("s").exists() && path.join("s").exists());
        std::fs::remove_dir_all(path).unwrap();
        std::fs::remove_dir_all(moved).unwrap();
    }

    #[test]
    fn only_a_dead_socket_of_ours_is_stale() {
        let (directory, path) = scratch();
        let dead = |at: &Path| drop(std::os::unix::net::UnixListener::bind(at).unwrap());
        dead(&path.join("dead"));
        let _live = directory.listen(name("live"), KIND).unwrap();
        std::fs::write(path.join("file"), "mine").unwrap();
        dead(&path.join("target"));
        std::os::unix::fs::symlink(path.join("target"), path.join("link")).unwrap();
        std::fs::create_dir(path.join("folder")).unwrap();
        for kept in ["live", "file", "link", "folder", "missing"] {
            assert!(!directory.remove_stale_socket(name(kept), KIND, true), "{kept}");
        }
        assert!(["live", "file", "link", "folder", "target"].iter().all(|n| path.join(n).exists()));
        assert!(directory.remove_stale_socket(name("dead"), KIND, true));
        assert!(!path.join("dead").exists());
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn where_others_can_put_files_nothing_is_stale() {
        use std::os::unix::fs::PermissionsExt;
        let (directory, path) = scratch();
        drop(std::os::unix::net::UnixListener::bind(path.join("dead")).unwrap());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!directory.remove_stale_socket(name("dead"), KIND, false));
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn links_and_open_directories_are_not_private() {
        use std::os::unix::fs::PermissionsExt;
        let (_directory, path) = scratch();
        let link = path.with_extension("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Directory::open_private(&path).is_ok());
        assert!(Directory::open_private(&link).is_err());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(Directory::open_private(&path).err(), Some(Errno::PERM));
        std::fs::remove_file(link).unwrap();
        std::fs::remove_dir_all(path).unwrap();
    }
}
