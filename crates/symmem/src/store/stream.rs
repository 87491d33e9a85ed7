//! What the store's wire format travels over: TCP, or a Unix socket for ranks that share a directory and no network.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt;

/// What an address of a Unix socket begins with.
const UNIX: &str = "unix:";
/// How many clients may knock at once before they are let in.
const BACKLOG: i32 = 4096;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Address {
    /// All that `text` stands for: `host:port`, or `unix:` and a path.
    pub(super) fn resolve(text: &str) -> io::Result<Vec<Self>> {
        match text.strip_prefix(UNIX) {
            Some(path) => Ok(vec![Self::Unix(path.into())]),
            None => Ok(text.to_socket_addrs()?.map(Self::Tcp).collect()),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens without blocking.
    pub(super) fn bind(text: &str) -> io::Result<(Self, Address)> {
        let listener = match text.strip_prefix(UNIX) {
            Some(path) => Self::Unix(bind_unix(Path::new(path))?),
            None => Self::Tcp(TcpListener::bind(text)?),
        };
        // Again, because std's queue is too short for all ranks of a job at once.
        rustix::net::listen(&listener, BACKLOG)?;
        rustix::io::ioctl_fionbio(&listener, true)?;
        let address = match &listener {
            Self::Tcp(listener) => Address::Tcp(listener.local_addr()?),
            Self::Unix(_) => Address::Unix(text.trim_start_matches(UNIX).into()),
        };
        Ok((listener, address))
    }

    pub(super) fn accept(&self) -> io::Result<(Stream, String)> {
        let (stream, peer) = match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                stream.set_nodelay(true)?;
                (Stream::Tcp(stream), peer.to_string())
            }
            Self::Unix(listener) => (Stream::Unix(listener.accept()?.0), "a local client".into()),
        };
        rustix::io::ioctl_fionbio(&stream, true)?;
        Ok((stream, peer))
    }
}

/// A socket file that nobody listens at is left from a crash, and makes room.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(e) if e.kind() == ErrorKind::AddrInUse && is_deserted(path) => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

fn is_deserted(path: &Path) -> bool {
    UnixStream::connect(path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
}

pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects, and goes on without blocking.
    pub(super) fn connect(address: &Address, limit: Duration) -> io::Result<Self> {
        let stream = match address {
            Address::Tcp(peer) => {
                let stream = TcpStream::connect_timeout(peer, limit)?;
                if stream.local_addr()? == *peer {
                    // The kernel may pick the server's own port for us, and so connect us to ourselves.
                    return Err(ErrorKind::ConnectionRefused.into());
                }
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                Self::Tcp(stream)
            }
            Address::Unix(path) => Self::Unix(UnixStream::connect(path)?),
        };
        rustix::io::ioctl_fionbio(&stream, true)?;
        Ok(stream)
    }
}

/// A wait without a deadline must end when the server's host is switched off.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}
