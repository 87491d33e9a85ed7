//! Where a rank listens for ranks of other hosts: which address, which port.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::connect::OP;
use super::{interfaces, stream};
use crate::error::{Error, Result};
use crate::store::SharedStore;

const ADDR: &str = "SYMMEM_ADDR";
const IFACE: &str = "SYMMEM_IFACE";
/// What chooses the address.
pub(super) const NAMES: &str = "SYMMEM_ADDR or SYMMEM_IFACE";
const PORTS: &str = "SYMMEM_PORTS";
/// How many connections may wait to be accepted.
const BACKLOG: i32 = 4096;

/// What the environment says.
#[derive(Default)]
struct Settings {
    address: Option<String>,
    interface: Option<String>,
    ports: Option<String>,
}

impl Settings {
    fn read() -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name| set(name).map(|value| value.to_string_lossy().into_owned());
        Self { address: text(ADDR), interface: text(IFACE), ports: text(PORTS) }
    }

    /// The address, and what it is called in errors.
    fn choose(&self, store: &SharedStore) -> Result<(IpAddr, String)> {
        self.choose_from(store.local_address(), &|| store.describe())
    }

    /// The same, of a rank that reaches the store from `local`.
    fn choose_from(
        &self,
        local: Option<IpAddr>,
        store: &dyn Fn() -> String,
    ) -> Result<(IpAddr, String)> {
        let (address, named) = match (&self.address, &self.interface) {
            (Some(_), Some(_)) => {
                return Err(usage(format!("one of {ADDR} and {IFACE}"), "both".to_owned()));
            }
            (Some(text), None) => (parse(text)?, format!("{ADDR}={text}")),
            (None, Some(name)) => (of_interface(name)?, format!("{IFACE}={name}")),
            (None, None) => match local {
                Some(address) => {
                    (address, "the address by which this rank reaches the store".to_owned())
                }
                None => {
                    return Err(Error::Unavailable {
                        what: "an address for ranks of other hosts".into(),
                        why: format!("{} is not reached over TCP; set {NAMES}", store()),
                    });
                }
            },
        };
        let unusable = address.is_unspecified() || address.is_multicast() || is_link_local(address);
        if unusable {
            let expected = format!("{named} to be an address of one interface that others reach");
            return Err(usage(expected, address.to_string()));
        }
        Ok((address, named))
    }

    fn ports(&self) -> Result<RangeInclusive<u16>> {
        let Some(text) = &self.ports else { return Ok(0..=0) };
        let range = text.split_once('-').and_then(|(low, high)| {
            let (low, high) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
            (0 < low && low <= high).then_some(low..=high)
        });
        let expected = || format!("{PORTS} to be two ports, as in 40000-40099");
        range.ok_or_else(|| usage(expected(), format!("{text:?}")))
    }
}

/// Where ranks of other hosts find one that reaches the store from `local`: the address, what chose it, and its interface.
pub fn between_hosts(local: Option<IpAddr>) -> Result<(IpAddr, String, Option<String>)> {
    let (address, named) = Settings::read().choose_from(local, &|| "the store".to_owned())?;
    let found = interfaces::addresses().unwrap_or_default();
    let interface = found.into_iter().find(|(_, own)| *own == address).map(|(name, _)| name);
    Ok((address, named, interface))
}

/// Listens for ranks of other hosts.
pub(super) fn listen(rank: usize, store: &SharedStore) -> Result<(OwnedFd, SocketAddr)> {
    let settings = Settings::read();
    let (address, named) = settings.choose(store)?;
    let ports = settings.ports()?;
    let (low, count) = (*ports.start(), ports.len());
    // Ranks of a host begin at different ports.
    let offsets = (0..count).map(|i| (rank + i) % count);
    for port in offsets.map(|offset| low.saturating_add(offset as u16)) {
        match bind(SocketAddr::new(address, port)) {
            Ok(bound) => return Ok(bound),
            Err(Errno::ADDRINUSE) => {}
            Err(Errno::ADDRNOTAVAIL) => {
                let expected = format!("{named} to be an address of this host ({})", known());
                return Err(usage(expected, address.to_string()));
            }
            Err(Errno::ACCESS) => {
                let expected = format!("{PORTS} to be ports that this user may listen at");
                return Err(usage(expected, port.to_string()));
            }
            Err(e) => return Err(Error::system(format!("listening at {address}:{port}"))(e)),
        }
    }
    Err(Error::Unavailable {
        what: format!("a port of {address} for ranks of other hosts"),
        why: format!("all {count} of {PORTS}={} are in use", settings.ports.unwrap_or_default()),
    })
}

fn bind(address: SocketAddr) -> Result<(OwnedFd, SocketAddr), Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    if address.port() != 0 {
        // A port of an earlier job is free, though its connections are not forgotten yet.
        net::sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    stream::prepare(&socket)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    let bound = net::getsockname(&socket)?;
    Ok((socket, bound.try_into()?))
}

/// The first rank whose address no other host reaches, while ranks of other hosts have better ones.
pub(super) fn misplaced(addresses: &[SocketAddr]) -> Option<usize> {
    let is_loopback = |address: &SocketAddr| address.ip().is_loopback();
    let all = addresses.iter().all(is_loopback); // a test on one machine
    addresses.iter().position(is_loopback).filter(|_| !all)
}

fn parse(text: &str) -> Result<IpAddr> {
    let expected = || format!("{ADDR} to be an IP address of this host ({})", known());
    text.trim().parse().map_err(|_| usage(expected(), format!("{text:?}")))
}

/// The interface's address: IPv4 before IPv6.
fn of_interface(name: &str) -> Result<IpAddr> {
    let found = interfaces::addresses().map_err(Error::system("listing the network interfaces"))?;
    let own = found.iter().filter(|(interface, _)| interface == name).map(|(_, ip)| *ip);
    let usable = own.filter(|ip| !is_link_local(*ip)).min_by_key(IpAddr::is_ipv6);
    let expected = || format!("{IFACE} to be an interface with an address ({})", listed(&found));
    usable.ok_or_else(|| usage(expected(), format!("{name:?}")))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// This host's addresses, for errors.
fn known() -> String {
    interfaces::addresses().map_or_else(|e| format!("no list of them: {e}"), |f| listed(&f))
}

fn listed(found: &[(String, IpAddr)]) -> String {
    let usable = found.iter().filter(|(_, ip)| !is_link_local(*ip));
    let each: Vec<String> = usable.map(|(name, ip)| format!("{name} {ip}")).collect();
    format!("there are {}", each.join(", "))
}

fn usage(expected: String, got: String) -> Error {
    Error::Usage { op: OP, rank: None, expected, got }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::MemoryStore;

    fn chosen(address: Option<&str>, interface: Option<&str>) -> Result<IpAddr, String> {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let (address, interface) = (address.map(str::to_owned), interface.map(str::to_owned));
        let settings = Settings { address, interface, ports: None };
        settings.choose(&store).map(|(ip, _)| ip).map_err(|e| e.to_string())
    }

    #[test]
    fn what_is_wrong_with_an_address_is_told_with_its_variable() {
        assert_eq!(chosen(Some("127.0.0.1"), None).unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert_eq!(chosen(None, Some("lo")).unwrap(), IpAddr::from([127, 0, 0, 1]));
        let told = |address, interface| chosen(address, interface).unwrap_err();
        let e = told(Some("here"), None);
        assert!(e.contains("SYMMEM_ADDR") && e.contains("\"here\"") && e.contains("lo 127"), "{e}");
        for ip in ["0.0.0.0", "::", "224.0.0.1", "fe80::1"] {
            let e = told(Some(ip), None);
            assert!(e.contains(&format!("SYMMEM_ADDR={ip}")), "{e}");
        }
        let e = told(None, Some("wan9"));
        assert!(e.contains("SYMMEM_IFACE") && e.contains("wan9") && e.contains("lo 127"), "{e}");
        let e = told(Some("127.0.0.1"), Some("lo"));
        assert!(e.contains("one of SYMMEM_ADDR and SYMMEM_IFACE"), "{e}");
        let e = told(None, None);
        assert!(e.contains("SYMMEM_ADDR or SYMMEM_IFACE"), "{e}");
    }

    #[test]
    fn a_loopback_address_among_others_is_misplaced() {
        let at = |texts: [&str; 3]| misplaced(&texts.map(|text| text.parse().unwrap()));
        assert_eq!(at(["10.0.0.1:1", "127.0.1.1:1", "10.0.0.2:1"]), Some(1));
        assert_eq!(at(["127.0.0.1:1", "127.0.0.1:2", "[::1]:3"]), None);
        assert_eq!(at(["10.0.0.1:1", "[fd00::1]:2", "10.0.0.3:3"]), None);
    }

    #[test]
    fn ports_are_two_numbers_in_order() {
        let ports =
            |text: &str| Settings { ports: Some(text.to_owned()), ..Settings::default() }.ports();
        assert_eq!(ports("40000-40099").unwrap(), 40000..=40099);
        assert_eq!(ports("7-7").unwrap(), 7..=7);
        for text in ["40000", "9-8", "0-9", "1-70000", "-1", "a-b"] {
            let e = ports(text).unwrap_err().to_string();
            assert!(e.contains("SYMMEM_PORTS") && e.contains(text), "{e}");
        }
    }
}
