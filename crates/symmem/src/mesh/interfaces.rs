//! The addresses of this host's network interfaces, as the kernel tells them over netlink (`rtnetlink(7)`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice, recv, send,
    socket_with,
};

/// Kinds of messages: `NLMSG_ERROR`, `NLMSG_DONE`, `RTM_NEWADDR`, `RTM_GETADDR`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
const ADDRESS: u16 = 20;
const ADDRESSES: u16 = 22;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const ALL: u16 = 0x301;
/// The lengths of `nlmsghdr`, and of that with `ifaddrmsg`.
const HEADER: usize = 16;
const FIXED: usize = 24;
/// `IFA_ADDRESS`, the other end's where there is one, and `IFA_LOCAL`.
const ANY_END: u16 = 1;
const OWN_END: u16 = 2;
/// More answers than any host has.
const MOST: usize = 1000;

/// The name of every interface with each of its addresses.
pub(super) fn addresses() -> Result<Vec<(String, IpAddr)>, Errno> {
    // Of protocol 0, NETLINK_ROUTE.
    let kind = SocketType::DGRAM;
    let socket = socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, None)?;
    let mut question = Vec::with_capacity(FIXED);
    question.extend((FIXED as u32).to_ne_bytes());
    question.extend([ADDRESSES, ALL].map(u16::to_ne_bytes).concat());
    question.resize(FIXED, 0);
    send(&socket, &question, SendFlags::DONTWAIT)?;
    let mut found = Vec::new();
    for _ in 0..MOST {
        // The kernel answers while it is asked, and when it is read from.
        let mut buffer = [0; 32 << 10];
        let (_, len) = recv(&socket, &mut buffer, RecvFlags::DONTWAIT)?;
        if read(buffer.get(..len).unwrap_or_default(), &mut found)? {
            break;
        }
    }
    let name = |(index, address)| Some((netdevice::index_to_name(&socket, index).ok()?, address));
    Ok(found.into_iter().filter_map(name).collect())
}

/// The interface that has this address.
pub(crate) fn name_of(address: IpAddr) -> Option<String> {
    let all = addresses().ok()?;
    all.into_iter().find(|(_, own)| *own == address).map(|(name, _)| name)
}

/// Takes in the addresses of one answer, with the numbers of their interfaces; whether it is the last.
fn read(mut answer: &[u8], found: &mut Vec<(u32, IpAddr)>) -> Result<bool, Errno> {
    while let Some(len) = field(answer, 0).map(u32::from_ne_bytes) {
        let len = len as usize;
        let message = answer.get(..len).filter(|m| m.len() >= HEADER).ok_or(Errno::BADMSG)?;
        match field(message, 4).map(u16::from_ne_bytes) {
            Some(DONE) => return Ok(true),
            Some(ERROR) => {
                let code = field(message, HEADER).map_or(0, i32::from_ne_bytes);
                return Err(Errno::from_raw_os_error(code.saturating_neg()));
            }
            Some(ADDRESS) => found.extend(address(message)),
            _ => {}
        }
        answer = answer.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn address(message: &[u8]) -> Option<(u32, IpAddr)> {
    let index = u32::from_ne_bytes(field(message, HEADER + 4)?);
    let (mut rest, mut best) = (message.get(FIXED..)?, None);
    while let Some([a, b, c, d]) = field(rest, 0) {
        let (len, kind) = (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([c, d]));
        let value = rest.get(4..len)?;
        let address = match value.len() {
            4 => field(value, 0).map(|octets: [u8; 4]| Ipv4Addr::from(octets).into()),
            16 => field(value, 0).map(|octets: [u8; 16]| Ipv6Addr::from(octets).into()),
            _ => None,
        };
        if kind == OWN_END || kind == ANY_END && best.is_none() {
            best = address.or(best);
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    best.map(|address| (index, address))
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_its_address() {
        let found = addresses().unwrap();
        let loopback = ("lo".to_owned(), IpAddr::from([127, 0, 0, 1]));
        assert!(found.contains(&loopback), "{found:?}");
    }

    #[test]
    fn answers_that_end_early_are_refused() {
        let mut message = Vec::new();
        message.extend(200_u32.to_ne_bytes());
        message.extend([ADDRESS, 0].map(u16::to_ne_bytes).concat());
        message.resize(60, 1);
        assert_eq!(read(&message, &mut Vec::new()), Err(Errno::BADMSG));
        assert_eq!(read(&[0; 16], &mut Vec::new()), Err(Errno::BADMSG));
        assert_eq!(read(&[], &mut Vec::new()), Ok(false));
    }
}
