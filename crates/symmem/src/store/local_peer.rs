//! The user at the other end of a TCP connection within this machine, from the kernel's tables of sockets.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

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

/// The TCP sockets of this machine, or network namespace, at one moment: those at one port, by their addresses.
pub(super) struct Sockets(HashMap<(SocketAddr, SocketAddr), Row>);

/// What the kernel says of a socket.
struct Row {
    is_established: bool,
    uid: u32,
}

impl Sockets {
    /// Those at `port`, at either end.
    pub(super) fn at(port: u16) -> Self {
        let table = |name: &str| std::fs::read_to_string(format!("/proc/self/net/{name}")).ok();
        Self::parse(["tcp", "tcp6"].into_iter().filter_map(table), port)
    }

    fn parse(tables: impl Iterator<Item = String>, port: u16) -> Self {
        let port = format!(":{port:04X} ");
        let mut rows = HashMap::new();
        for table in tables {
            let lines = table.lines().skip(1).filter(|line| line.contains(&port));
            rows.extend(lines.filter_map(row));
        }
        Self(rows)
    }

    /// The other end of the connection that is `local` here and `peer` there.
    pub(super) fn other_end(&self, local: SocketAddr, peer: SocketAddr) -> Peer {
        let (local, peer) = (canonical(local), canonical(peer));
        match self.0.get(&(peer, local)) {
            Some(Row { is_established: true, uid }) => Peer::User(*uid),
            Some(_) => Peer::Nobody,
            // Where our own end is not listed, the tables say nothing.
            None if !self.0.contains_key(&(local, peer)) => Peer::Remote,
            None if is_of_this_machine(peer.ip()) => Peer::Nobody,
            None => Peer::Remote,
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
    SocketAddr::new(address.ip().to_canonical(), address.port())
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
            let (server, peer) = listener.accept().unwrap();
            let me = Peer::User(crate::private::user());
            let sockets = Sockets::at(port);
            assert_eq!(sockets.other_end(server.local_addr().unwrap(), peer), me, "{listens}");
            let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            assert_eq!(sockets.other_end(local, peer), me, "{listens}");
            drop(client);
            let ended = Sockets::at(port);
            let (local, peer) = (server.local_addr().unwrap(), server.peer_addr().unwrap());
            assert_eq!(ended.other_end(local, peer), Peer::Nobody, "{listens}");
        }
    }

    #[test]
    fn an_address_elsewhere_is_remote_and_a_machine_without_tables_knows_nobody() {
        let local = "127.0.0.1:1".parse().unwrap();
        assert_eq!(Sockets::at(1).other_end(local, "192.0.2.1:5".parse().unwrap()), Peer::Remote);
        let here = "127.0.0.1:2".parse().unwrap();
        let none = Sockets(HashMap::new());
        assert_eq!(none.other_end(local, here), Peer::Remote);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_kernels_tables_are_understood() {
        let row = "  7: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4242 1";
        let parse = |row: &str| Sockets::parse([format!("header\n{row}\n")].into_iter(), 8080);
        let sockets = parse(row);
        let (there, here) = ("127.0.0.1:8080".parse().unwrap(), "127.0.0.1:50000".parse().unwrap());
        assert_eq!(sockets.other_end(here, there), Peer::User(1000));
        let closing = parse(&row.replace(" 01 ", " 06 "));
        assert_eq!(closing.other_end(here, there), Peer::Nobody);
        let mapped = address("0000000000000000FFFF00000100007F:1F90");
        assert_eq!(mapped, Some(there));
    }
}
