//! The user at the other end of a TCP connection within this machine, as the kernel knows it.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};

use super::socket_query::SocketQuery;

/// Sockets that a process still holds; all others belong to nobody.
const ESTABLISHED: &str = "01";

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process of this user, on this machine.
    User(u32),
    /// Somebody on this machine who holds the socket no more.
    Nobody,
    /// Another machine, or one that cannot be told from it.
    Remote,
}

/// The TCP sockets of this machine, or network namespace, at one port.
pub(super) struct Sockets {
    port: u16,
    /// Costs the same however many sockets there are: others could fill the table faster than we can read it.
    query: Option<SocketQuery>,
    /// For kernels that answer no queries; read when it is needed, and newer than the connections that are looked up in it.
    table: OnceCell<io::Result<Table>>,
}

/// What the kernel says of a socket.
pub(super) struct Row {
    pub(super) is_established: bool,
    pub(super) uid: u32,
}

impl Sockets {
    /// Those at `port`, at either end.
    pub(super) fn at(port: u16) -> Self {
        Self { port, query: SocketQuery::open().ok(), table: OnceCell::new() }
    }

    /// Forgets what has been read before the connections to come.
    pub(super) fn renew(&mut self) {
        self.table = OnceCell::new();
    }

    /// The other end of `stream`.
    pub(super) fn other_end(&self, stream: &TcpStream) -> Peer {
        let ends = || Some((stream.local_addr().ok()?, stream.peer_addr().ok()?));
        let Some((local, peer)) = ends() else { return Peer::Nobody };
        if let Some(found) = self.by_query(local, peer) {
            return found;
        }
        // It may have ended since, and is then no reason to read the table.
        if ends().is_none() { Peer::Nobody } else { self.by_table(local, peer) }
    }

    /// `None` where the kernel does not say.
    fn by_query(&self, local: SocketAddr, peer: SocketAddr) -> Option<Peer> {
        let (local, peer) = (canonical(local), canonical(peer));
        let query = self.query.as_ref()?;
        match query.connected(peer, local).ok()? {
            Some(row) => Some(row.peer()),
            // A table without our own end tells nothing.
            None => query.connected(local, peer).ok()?.map(|_| absent(peer)),
        }
    }

    fn by_table(&self, local: SocketAddr, peer: SocketAddr) -> Peer {
        match self.table.get_or_init(|| Table::read(self.port)) {
            Ok(table) => table.other_end(local, peer),
            // There is a table, and it may say that this is a stranger.
            Err(error) => {
                tracing::warn!(%error, "the kernel's table of sockets cannot be read");
                Peer::Nobody
            }
        }
    }
}

impl Row {
    fn peer(&self) -> Peer {
        if self.is_established { Peer::User(self.uid) } else { Peer::Nobody }
    }
}

/// Who is at the other end of a connection where this machine has only ours.
fn absent(peer: SocketAddr) -> Peer {
    if is_of_this_machine(peer.ip()) { Peer::Nobody } else { Peer::Remote }
}

/// Sockets by their addresses.
struct Table(HashMap<(SocketAddr, SocketAddr), Row>);

impl Table {
    fn read(port: u16) -> io::Result<Self> {
        let mut table = Self(HashMap::new());
        for name in ["tcp", "tcp6"] {
            match File::open(format!("/proc/self/net/{name}")) {
                Ok(file) => table.add(BufReader::new(file), port)?,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::PermissionDenied
                    ) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(table)
    }

    /// Line by line: others decide how many there are.
    fn add(&mut self, rows: impl BufRead, port: u16) -> io::Result<()> {
        let port = format!(":{port:04X} ");
        for line in rows.lines().skip(1) {
            self.0.extend(Some(line?).filter(|line| line.contains(&port)).as_deref().and_then(row));
        }
        Ok(())
    }

    /// The other end of the connection that is `local` here and `peer` there.
    fn other_end(&self, local: SocketAddr, peer: SocketAddr) -> Peer {
        let [local, peer] = [local, peer].map(|end| plain(canonical(end)));
        match self.0.get(&(peer, local)) {
            Some(row) => row.peer(),
            // Where our own end is not listed, the tables say nothing.
            None if !self.0.contains_key(&(local, peer)) => Peer::Remote,
            None => absent(peer),
        }
    }
}

/// The addresses of a line of a table, the local one first, and what it says of them.
fn row(line: &str) -> Option<((SocketAddr, SocketAddr), Row)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (here, there, state) = (words.next()?, words.next()?, words.next()?);
    let uid = words.nth(3)?.parse().ok()?;
    Some(((address(here)?, address(there)?), Row { is_established: state == ESTABLISHED, uid }))
}

/// An IPv4 address also where it was written as one of IPv6.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

/// Without the interface, which the table does not name.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

/// Only an address of this machine can be bound.
fn is_of_this_machine(ip: IpAddr) -> bool {
    ip.is_loopback() || UdpSocket::bind((ip, 0)).is_ok()
}

/// Words of 32 bits in the machine's own order, and a port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(ip.get(8 * at..8 * at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words.concat()).ok()?))
        }
        _ => return None,
    };
    Some(canonical(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Both ways to ask, which must agree.
    fn other_end(of: &TcpStream, port: u16) -> Peer {
        let (local, peer) = (of.local_addr().unwrap(), of.peer_addr().unwrap());
        let sockets = Sockets::at(port);
        let found = sockets.by_table(local, peer);
        if let Some(answer) = sockets.by_query(local, peer) {
            assert_eq!(answer, found);
        }
        assert_eq!(sockets.other_end(of), found);
        found
    }

    #[test]
    fn both_ends_of_a_connection_find_each_others_user() {
        for (listens, connects) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "127.0.0.1"),
        ] {
            let Ok(listener) = TcpListener::bind(listens) else { continue };
            let port = listener.local_addr().unwrap().port();
            let Ok(client) = TcpStream::connect((connects, port)) else { continue };
            let (server, _) = listener.accept().unwrap();
            let me = Peer::User(crate::private::user());
            assert_eq!(other_end(&server, port), me, "{listens}");
            assert_eq!(other_end(&client, port), me, "{listens}");
            drop(client);
            assert_eq!(other_end(&server, port), Peer::Nobody, "{listens}");
        }
    }

    #[test]
    fn a_listener_is_not_taken_for_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (local, peer) = (listener.local_addr().unwrap(), "127.0.0.1:1".parse().unwrap());
        let sockets = Sockets::at(local.port());
        assert_eq!(sockets.by_query(local, peer), None);
        assert_eq!(sockets.by_query(peer, local), None);
    }

    #[test]
    fn a_table_that_cannot_be_read_admits_nobody() {
        let sockets = Sockets::at(1);
        let full: io::Error = rustix::io::Errno::MFILE.into();
        assert!(sockets.table.set(Err(full)).is_ok());
        let end = "127.0.0.1:1".parse().unwrap();
        assert_eq!(sockets.by_table(end, end), Peer::Nobody);
    }

    #[test]
    fn an_address_elsewhere_is_remote_and_a_machine_without_tables_knows_nobody() {
        let (local, far) = ("127.0.0.1:1".parse().unwrap(), "192.0.2.1:5".parse().unwrap());
        assert_eq!(Sockets::at(1).by_query(local, far), None);
        assert_eq!(Sockets::at(1).by_table(local, far), Peer::Remote);
        assert_eq!(absent(far), Peer::Remote);
        let here = "127.0.0.1:2".parse().unwrap();
        let none = Table(HashMap::new());
        assert_eq!(none.other_end(local, here), Peer::Remote);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_kernels_tables_are_understood() {
        let row = "  7: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4242 1";
        let parse = |row: &str| {
            let mut table = Table(HashMap::new());
            table.add(format!("header\n{row}\n").as_bytes(), 8080).unwrap();
            table
        };
        let sockets = parse(row);
        let (there, here) = ("127.0.0.1:8080".parse().unwrap(), "127.0.0.1:50000".parse().unwrap());
        assert_eq!(sockets.other_end(here, there), Peer::User(1000));
        let closing = parse(&row.replace(" 01 ", " 06 "));
        assert_eq!(closing.other_end(here, there), Peer::Nobody);
        let mapped = address("0000000000000000FFFF00000100007F:1F90");
        assert_eq!(mapped, Some(there));
    }
}
