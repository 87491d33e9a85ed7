//! Asks the kernel for one TCP socket by its addresses: what `ss` does, over netlink (`sock_diag(7)`).

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use super::local_peer::Row;

/// Kinds of messages: `SOCK_DIAG_BY_FAMILY` of the question and its answer, and the kernel's errors.
const BY_FAMILY: u16 = 20;
const ERROR: u16 = 2;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `IPPROTO_TCP`, and `TCP_ESTABLISHED`.
const TCP: u8 = 6;
const ESTABLISHED: u8 = 1;
/// The lengths of `nlmsghdr` and of `inet_diag_req_v2`.
const QUESTION_LEN: u32 = 16 + 56;

/// Where questions go. It is opened once, because later there may be no descriptor for it.
pub(super) struct SocketQuery {
    socket: OwnedFd,
    asked: Cell<u32>,
}

impl SocketQuery {
    pub(super) fn open() -> Result<Self, Errno> {
        let protocol = Some(netlink::SOCK_DIAG);
        let kind = SocketType::DGRAM;
        let socket = socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, protocol)?;
        Ok(Self { socket, asked: Cell::new(0) })
    }

    /// The connected socket that is `here` at its own end and `there` at the other.
    pub(super) fn connected(
        &self,
        here: SocketAddr,
        there: SocketAddr,
    ) -> Result<Option<Row>, Errno> {
        let number = self.asked.get().wrapping_add(1);
        self.asked.set(number);
        send(&self.socket, &question(here, there, number), SendFlags::DONTWAIT)?;
        loop {
            // The kernel has answered before `send` returns.
            let mut buffer = [0; 1024];
            let (_, len) = recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT)?;
            let answer = buffer.get(..len).unwrap_or_default();
            if field(answer, 8).map(u32::from_ne_bytes) == Some(number) {
                return understood(answer, here.port(), there.port()).ok_or(Errno::BADMSG)?;
            }
        }
    }
}

/// A header and `inet_diag_req_v2`: a socket in any state, on any interface unless the addresses name one.
fn question(here: SocketAddr, there: SocketAddr, number: u32) -> Vec<u8> {
    let family = if here.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut bytes = Vec::with_capacity(QUESTION_LEN as usize);
    bytes.extend(QUESTION_LEN.to_ne_bytes());
    bytes.extend([BY_FAMILY, REQUEST].map(u16::to_ne_bytes).concat());
    bytes.extend([number, 0].map(u32::to_ne_bytes).concat());
    bytes.extend([family.as_raw() as u8, TCP, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend([here.port(), there.port()].map(u16::to_be_bytes).concat());
    for end in [here, there] {
        match end.ip() {
            IpAddr::V4(ip) => bytes.extend([&ip.octets()[..], &[0; 12]].concat()),
            IpAddr::V6(ip) => bytes.extend(ip.octets()),
        }
    }
    let interface = if let SocketAddr::V6(here) = here { here.scope_id() } else { 0 };
    // The last two are a name for the socket, and mean here that we know none.
    bytes.extend([interface, u32::MAX, u32::MAX].map(u32::to_ne_bytes).concat());
    bytes
}

/// What a header and `inet_diag_msg`, or an error, say; `None` if they are too short.
fn understood(answer: &[u8], here: u16, there: u16) -> Option<Result<Option<Row>, Errno>> {
    match u16::from_ne_bytes(field(answer, 4)?) {
        ERROR => {
            let error = i32::from_ne_bytes(field(answer, 16)?).saturating_neg();
            let error = Errno::from_raw_os_error(error);
            Some(if error == Errno::NOENT { Ok(None) } else { Err(error) })
        }
        BY_FAMILY => {
            let [state] = field(answer, 17)?;
            let ports = [field(answer, 20)?, field(answer, 22)?].map(u16::from_be_bytes);
            let uid = u32::from_ne_bytes(field(answer, 80)?);
            // Where no socket is connected so, the kernel names one that listens there.
            let found = ports == [here, there];
            Some(Ok(found.then_some(Row { is_established: state == ESTABLISHED, uid })))
        }
        _ => None,
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
