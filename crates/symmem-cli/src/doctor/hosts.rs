//! How ranks of this host and of others would reach each other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};

use symmem::internals::{between_hosts, host_identity};
use symmem_sys::ucx;

use super::{Row, checked, reach, row};

const CONGESTION: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// One row per thing that matters between hosts.
pub(super) fn rows() -> Vec<Row> {
    let mut rows = vec![host()];
    let store = Store::find();
    let address = between_hosts(store.local);
    rows.push(match &address {
        Ok((ip, named, interface)) => {
            let interface = interface.as_deref().unwrap_or("no interface of this host has it");
            let details = format!("{interface}; {}", store.said(named));
            row("address", &ip.to_string(), details)
        }
        Err(error) => checked("address", Err(error.to_string())),
    });
    if let Ok((ip, _, Some(interface))) = &address {
        let mtu = std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"));
        let mtu = mtu.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned());
        rows.push(row("MTU", &mtu, format!("bytes of a packet on {interface}")));
        if is_public(*ip) {
            let details = "the internet reaches this address: name another with SYMMEM_ADDR or SYMMEM_IFACE, or close the \
                           ports to strangers, and let SYMMEM_SECRET_FILE name a secret";
            rows.push(row("public address", "warning", details));
        }
    }
    rows.push(secret());
    rows.push(congestion());
    rows.push(checked("UCX", ucx()));
    rows.push(checked("trial over loopback", reach::trial().map_err(|why| format!("{why:#}"))));
    rows
}

fn host() -> Row {
    let is_set = std::env::var_os("SYMMEM_HOST").is_some_and(|name| !name.is_empty());
    let how = if is_set { "SYMMEM_HOST" } else { "the boot id, unless SYMMEM_HOST is set" };
    match host_identity() {
        Ok(name) => row("host", &name, format!("{how}; ranks with the same value share memory")),
        Err(error) => checked("host", Err(error.to_string())),
    }
}

/// The store that ranks would join.
struct Store {
    name: Option<String>,
    /// From where this host reaches it, or any other.
    local: Option<IpAddr>,
}

impl Store {
    fn find() -> Self {
        let get = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let host = get("MASTER_ADDR").filter(|host| !host.starts_with("unix:"));
        let port = get("MASTER_PORT").and_then(|port| port.parse().ok()).unwrap_or(29500);
        let known = host.map(|host| (format!("{host}:{port}"), source((host.as_str(), port))));
        if let Some((name, local)) = known {
            return Self { name: Some(name), local };
        }
        // No address of the documentation's networks is anybody's: the way there is the default one.
        let anywhere = source((Ipv4Addr::new(192, 0, 2, 1), 9));
        let local = anywhere.or_else(|| source(("2001:db8::1", 9)));
        Self { name: None, local: local.or(Some(Ipv4Addr::LOCALHOST.into())) }
    }

    /// Why the address is the one.
    fn said(&self, named: &str) -> String {
        if named.starts_with("SYMMEM") {
            return named.to_owned();
        }
        match &self.name {
            Some(name) => format!("{named} at {name}"),
            None => "the address of the default route; if MASTER_ADDR is set, the one by which the store is reached".to_owned(),
        }
    }
}

/// The address with which packets to `to` leave. Sends none.
fn source(to: impl ToSocketAddrs) -> Option<IpAddr> {
    to.to_socket_addrs().ok()?.find_map(|to| {
        let any = if to.is_ipv4() {
            IpAddr::from(Ipv4Addr::UNSPECIFIED)
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|local| local.ip())
    })
}

/// Whether strangers may reach it.
pub(super) fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, ..] = ip.octets();
            let is_carriers = a == 100 && (64..128).contains(&b);
            !(ip.is_private()
                || ip.is_loopback()
                || ip.is_link_local()
                || is_carriers
                || ip.is_documentation())
        }
        IpAddr::V6(ip) => {
            let of_four = ip.to_ipv4_mapped().map(IpAddr::from);
            of_four.map_or_else(
                || !(ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local()),
                is_public,
            )
        }
    }
}

fn secret() -> Row {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if set("SYMMEM_SECRET") || set("SYMMEM_SECRET_FILE") {
        return row("secret", "set", "connections between hosts are encrypted");
    }
    let details = "connections between hosts are not encrypted, unless the launcher gives ranks a secret: symmem run does on \
                   one node, and with --secret-file on several";
    row("secret", "not set", details)
}

/// How the kernel paces what is sent.
fn congestion() -> Row {
    let read = |name: &str| std::fs::read_to_string(name).map(|text| text.trim().to_owned());
    let Ok(name) = read(CONGESTION) else {
        return row("congestion control", "unknown", CONGESTION);
    };
    let details = if name == "bbr" {
        "slow for bursts of small messages, which it paces; for the network between the hosts, better set: ip \
         route change NETWORK dev INTERFACE congctl cubic, or sysctl -w net.ipv4.tcp_congestion_control=cubic"
    } else {
        "of TCP, unless the route sets another"
    };
    row("congestion control", &name, details)
}

fn ucx() -> Result<String, String> {
    match ucx::load() {
        Ok(library) => {
            let path =
                library.path().map_or_else(String::new, |path| format!(" ({})", path.display()));
            let used = "used if there are RDMA devices, all hosts have this version and the job has no secret";
            Ok(format!("{}{path}; {used}; see SYMMEM_WIRE", library.version()))
        }
        Err(missing) => Err(format!(
            "{missing}; not needed; any from {} on will do, see SYMMEM_UCX",
            ucx::OLDEST
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_public_if_strangers_may_reach_it() {
        for (ip, public) in [
            ("8.8.8.8", true),
            ("10.1.2.3", false),
            ("172.16.0.1", false),
            ("172.32.0.1", true),
            ("100.64.0.1", false),
            ("127.0.0.1", false),
            ("2a00::1", true),
            ("fd00::1", false),
            ("::ffff:192.168.0.1", false),
        ] {
            assert_eq!(is_public(ip.parse().unwrap()), public, "{ip}");
        }
    }

    #[test]
    fn packets_to_loopback_leave_from_there() {
        assert_eq!(source(("127.0.0.1", 9)), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(source(("no.such.name.invalid", 9)), None);
    }
}
