//! What the store's wire format travels over: TCP, or a Unix socket for ranks that share a directory and no network.

use std::ffi::OsStr;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::local_peer::{Peer, Sockets};
use crate::private::{self, Directory, SocketFile};
use crate::sync::Deadline;

/// What an address of a Unix socket begins with.
const UNIX: &str = "unix:";
/// How many clients may be waiting to be accepted.
const BACKLOG: i32 = 4096;
/// How long to sleep before looking again whether a connection stands, or whether the caller still wants it.
const NAP: Duration = Duration::from_millis(50);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Address {
    /// All that `text` stands for: `host:port`, or `unix:` and a path.
    pub(super) fn resolve(text: &str, until: Deadline) -> io::Result<Vec<Self>> {
        match text.strip_prefix(UNIX) {
            Some(path) => Ok(vec![Self::Unix(path.into())]),
            None => Ok(look_up(text, until)?.into_iter().map(Self::Tcp).collect()),
        }
    }
}

/// The addresses of a host. A name server may take longer than the caller has, so a thread of its own asks it.
fn look_up(text: &str, until: Deadline) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = text.parse() {
        return Ok(vec![address]);
    }
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let name = text.to_owned();
    std::thread::Builder::new().name("symmem-look-up".into()).spawn(move || {
        let _ = sender.send(name.to_socket_addrs().map(Iterator::collect));
    })?;
    loop {
        match receiver.recv_timeout(until.nap(NAP)) {
            Ok(addresses) => return addresses,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) if !until.expired() => {}
            Err(_) => return Err(ErrorKind::TimedOut.into()),
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
    Unix { listener: UnixListener, _file: SocketFile },
}

impl Listener {
    /// Listens without blocking.
    pub(super) fn bind(text: &str, until: Deadline) -> io::Result<(Self, Address)> {
        if let Some(path) = text.strip_prefix(UNIX) {
            let (listener, _file) = bind_unix(Path::new(path))?;
            return Ok((Self::Unix { listener, _file }, Address::Unix(path.into())));
        }
        let listener = TcpListener::bind(look_up(text, until)?.as_slice())?;
        // Again, because std's queue is too short for all ranks of a job at once.
        rustix::net::listen(&listener, BACKLOG)?;
        listener.set_nonblocking(true)?;
        let address = Address::Tcp(listener.local_addr()?);
        Ok((Self::Tcp(listener), address))
    }

    /// The next client, trusted or not, and its name in errors.
    pub(super) fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        let (stream, peer) = match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                stream.set_nodelay(true)?;
                (Stream::Tcp(stream), Some(peer))
            }
            Self::Unix { listener, .. } => (Stream::Unix(listener.accept()?.0), None),
        };
        rustix::io::ioctl_fionbio(&stream, true)?;
        Ok((stream, peer))
    }
}

/// A socket that nobody serves is left from a crash. It makes room if it is provably ours; everything else stays.
fn bind_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let name: &OsStr = path.file_name().ok_or(ErrorKind::InvalidInput)?;
    // Clients connect by the whole path.
    rustix::net::SocketAddrUnix::new(path)?;
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let directory = Directory::open(parent.unwrap_or(Path::new(".")))?;
    let bound = match directory.listen(name, SocketType::STREAM) {
        Err(Errno::ADDRINUSE) if directory.remove_stale_socket(name, SocketType::STREAM, true) => {
            directory.listen(name, SocketType::STREAM)
        }
        bound => bound,
    };
    let (socket, file) = bound?;
    Ok((socket.into(), file))
}

pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects, and goes on without blocking.
    pub(super) fn connect(address: &Address, until: Deadline) -> io::Result<Self> {
        match address {
            Address::Tcp(peer) => connect_tcp(*peer, until).map(Self::Tcp),
            Address::Unix(path) => connect_unix(path, until).map(Self::Unix),
        }
    }

    /// The user of the server at the other end, where it is on this machine.
    pub(super) fn server(&self) -> Peer {
        let port = match self {
            Self::Tcp(stream) => stream.peer_addr().map_or(0, |server| server.port()),
            Self::Unix(_) => return self.client(&None),
        };
        self.client(&Some(Sockets::at(port)))
    }

    /// This end's address, over TCP. One that stands for IPv4 is that.
    pub(super) fn local_address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => Some(stream.local_addr().ok()?.ip().to_canonical()),
            Self::Unix(_) => None,
        }
    }

    /// Closes it so that nothing of it stays behind, not even with the system.
    pub(super) fn abort(self) {
        let _ = sockopt::set_socket_linger(&self, Some(Duration::ZERO));
    }

    /// The user of the client at the other end, where it is on this machine. `sockets`, for TCP, are those at our port, and
    /// as new as the connection.
    pub(super) fn client(&self, sockets: &Option<Sockets>) -> Peer {
        match self {
            Self::Tcp(stream) => {
                sockets.as_ref().map_or(Peer::Nobody, |sockets| sockets.other_end(stream))
            }
            Self::Unix(stream) => private::peer_user(stream).map_or(Peer::Nobody, Peer::User),
        }
    }
}

fn connect_tcp(peer: SocketAddr, until: Deadline) -> io::Result<TcpStream> {
    let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &peer) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            let limit = Timespec::try_from(until.nap(NAP)).ok();
            while poll(&mut [PollFd::new(&socket, PollFlags::OUT)], limit.as_ref()) != Ok(1) {
                if until.expired() {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
            sockopt::socket_error(&socket)??;
        }
        Err(e) => return Err(e.into()),
    }
    let stream = TcpStream::from(socket);
    if stream.local_addr()? == peer {
        // The kernel may pick the server's own port for us, and so connect us to ourselves.
        return Err(ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    Ok(stream)
}

fn connect_unix(path: &Path, until: Deadline) -> io::Result<UnixStream> {
    loop {
        match private::connect(path, SocketType::STREAM) {
            Ok(socket) => return Ok(socket.into()),
            // Its queue is full: the server has not come to accepting yet.
            Err(Errno::AGAIN | Errno::INTR) if !until.expired() => {
                std::thread::sleep(until.nap(Duration::from_millis(2)));
            }
            Err(Errno::AGAIN | Errno::INTR) => return Err(ErrorKind::TimedOut.into()),
            Err(e) => return Err(e.into()),
        }
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
            Self::Unix { listener, .. } => listener.as_fd(),
        }
    }
}
