//! The hosts of `--hosts`, all on this machine: network namespaces joined by a cable or a bridge, or only names, over loopback.
//!
//! The namespaces have no names. They exist as long as a process is in them or holds their descriptor, so nothing is left of
//! them however the launcher ends.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::board::Board;
use super::measure::Bench;
use super::raw;
use super::record::Record;

/// The network of the hosts; host h has address h + 1 in it.
const NETWORK: &str = "10.213.77";
/// The interface of each host.
const CABLE: &str = "cable";
/// The network namespace of the thread that asks.
const HERE: &str = "/proc/thread-self/ns/net";
/// The burst and the queue of a limited rate: a queue that is longer shows in every round trip.
const LIMITS: [&str; 4] = ["burst", "64kb", "latency", "1ms"];
/// More than a bridge of one network has addresses for.
const MOST: usize = 250;

/// Where the ranks of several hosts run.
pub(super) struct Network {
    hosts: usize,
    rate: Option<String>,
    /// The namespaces, by host; none over loopback.
    spaces: Vec<OwnedFd>,
    /// What joins more than two of them.
    _bridge: Option<OwnedFd>,
    /// Why there are none, or what else there is to say.
    remarks: Vec<String>,
    /// What the ranks of all hosts share besides: the clock's readings, and flags between samples.
    shared: OwnedFd,
}

impl Network {
    /// Makes the namespaces, where this process may. The calling thread is in that of host 0 afterwards.
    pub(super) fn make(hosts: usize, rate: Option<&str>, ranks: usize) -> Result<Self> {
        ensure!(
            ranks.is_multiple_of(hosts),
            "{ranks} ranks cannot be spread evenly over {hosts} hosts"
        );
        ensure!(hosts <= MOST, "there can be at most {MOST} hosts");
        let bytes = Board::pad_size(ranks) * ranks + Bench::readings_size() * ranks;
        let shared = raw::shareable(bytes as u64).context("cannot make memory for all ranks")?;
        let mut network = Self {
            hosts,
            rate: rate.map(str::to_owned),
            spaces: Vec::new(),
            _bridge: None,
            remarks: Vec::new(),
            shared,
        };
        let home = File::open(HERE).context("no network namespaces")?;
        let place = std::fs::read_link(HERE).ok();
        if let Err(why) = network.connect() {
            // What has been made so far goes with its descriptors.
            network.spaces.clear();
            if std::fs::read_link(HERE).ok() != place {
                enter(&home).context("cannot return")?;
            }
            ensure!(rate.is_none(), "--rate needs network namespaces: {why:#}");
            network.remarks = vec![format!("no network namespaces ({why:#})")];
        }
        Ok(network)
    }

    fn connect(&mut self) -> Result<()> {
        for _ in 0..self.hosts {
            self.spaces.push(new_space()?);
        }
        if let [first, second] = self.spaces.as_slice() {
            enter(first)?;
            let other = path(second);
            ip(&["link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", &other])?;
        } else {
            let bridge = new_space()?;
            ip(&["link", "add", "bridge", "type", "bridge"])?;
            ip(&["link", "set", "bridge", "up"])?;
            for (host, space) in self.spaces.iter().enumerate() {
                let (port, inside) = (format!("port{host}"), path(space));
                ip(&[
                    "link", "add", &port, "type", "veth", "peer", "name", CABLE, "netns", &inside,
                ])?;
                ip(&["link", "set", &port, "master", "bridge", "up"])?;
            }
            self._bridge = Some(bridge);
        }
        for (host, space) in self.spaces.iter().enumerate() {
            enter(space)?;
            let address = address(host);
            ip(&["addr", "add", &format!("{address}/24"), "dev", CABLE])?;
            ip(&["link", "set", CABLE, "up"])?;
            // Else it would be that of this machine, which may hold back bursts of small packets.
            let route =
                format!("route replace {NETWORK}.0/24 dev {CABLE} src {address} congctl cubic");
            if let Err(why) = ip(&route.split(' ').collect::<Vec<_>>())
                && host == 0
            {
                self.remarks.push(format!("congestion control as this machine has it ({why:#})"));
            }
            if let Some(rate) = &self.rate {
                let words = ["qdisc", "replace", "dev", CABLE, "root", "tbf", "rate", rate];
                run("tc", &[&words[..], &LIMITS].concat())?;
            }
        }
        self.spaces.iter().try_for_each(await_cable)?;
        self.spaces.first().map_or(Ok(()), enter)
    }

    /// What the peers' ranks have to be told, as variables.
    pub(super) fn for_peers(&self) -> [(&'static str, String); 3] {
        let spaces: Vec<_> = self.spaces.iter().map(path).collect();
        let addresses: Vec<_> = (0..self.hosts).map(address).collect();
        [
            ("HOSTS", self.hosts.to_string()),
            ("SPACES", spaces.join(" ")),
            ("ADDRESSES", addresses.join(" ")),
        ]
    }

    /// Says of a figure that it was taken between these hosts.
    pub(super) fn mark(&self, record: &mut Record) {
        record.between(self.hosts, !self.spaces.is_empty(), self.rate.as_deref());
    }

    /// Why the hosts are not namespaces, if they are not.
    pub(super) fn no_spaces(&self) -> Option<String> {
        self.spaces.is_empty().then(|| self.remarks.join("; "))
    }

    /// The bytes that have come to host 0 and left it so far.
    pub(super) fn passed(&self) -> Result<u64> {
        let devices = std::fs::read_to_string("/proc/thread-self/net/dev");
        let devices = devices.context("cannot read how much has passed")?;
        counted(&devices).context("the first host has no cable")
    }

    /// Where the ranks find the store.
    pub(super) fn store(&self) -> String {
        if self.spaces.is_empty() { "127.0.0.1".to_owned() } else { address(0) }
    }

    /// What the ranks have to be told.
    pub(super) fn options(&self) -> Vec<String> {
        let spaces = self.spaces.iter().map(|space| format!("--space={}", path(space)));
        spaces.chain([format!("--shared={}", path(&self.shared))]).collect()
    }

    /// The heading of the figures.
    pub(super) fn text(&self, encrypted: bool) -> String {
        let way = match (self.spaces.is_empty(), &self.rate) {
            (true, _) => "one machine's loopback, told apart by SYMMEM_HOST".to_owned(),
            (false, None) => "network namespaces of one machine".to_owned(),
            (false, Some(rate)) => format!("network namespaces of one machine, at {rate} each way"),
        };
        let sealed = if encrypted { "encrypted" } else { "not encrypted" };
        let remarks: String = self.remarks.iter().map(|remark| format!("; {remark}")).collect();
        format!("{} hosts: {way}; connections between them are {sealed}{remarks}\n", self.hosts)
    }
}

/// The bytes received and sent, of the list that the kernel keeps.
fn counted(devices: &str) -> Option<u64> {
    let line = devices.lines().find_map(|line| line.trim_start().strip_prefix(CABLE))?;
    let mut numbers = line.strip_prefix(':')?.split_whitespace().map(str::parse::<u64>);
    Some(numbers.next()?.ok()? + numbers.nth(7)?.ok()?)
}

/// A cable is up a moment after both its ends are, and what is asked before leaves it out.
fn await_cable(space: &OwnedFd) -> Result<()> {
    enter(space)?;
    for _ in 0..100 {
        let output = Command::new("ip").args(["-o", "link", "show", CABLE]).output();
        let output = output.context("cannot run ip")?;
        if String::from_utf8_lossy(&output.stdout).contains("state UP") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("the cable does not come up")
}

fn address(host: usize) -> String {
    format!("{NETWORK}.{}", host + 1)
}

/// How other processes open it while this one holds it.
fn path(fd: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd())
}

/// A network namespace in which the calling thread is from here on, with its loopback up.
fn new_space() -> Result<OwnedFd> {
    raw::leave_network().context("this user may make none")?;
    ip(&["link", "set", "lo", "up"])?;
    Ok(File::open(HERE).context("no network namespaces")?.into())
}

/// Moves the calling thread into a network namespace; threads and processes that it starts are there too.
pub(super) fn enter(space: &impl AsFd) -> Result<()> {
    move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter a network namespace")
}

fn ip(words: &[&str]) -> Result<()> {
    run("ip", words)
}

fn run(program: &str, words: &[&str]) -> Result<()> {
    let output = Command::new(program).args(words).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} {}: {}", words.join(" "), said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_passed_is_received_and_sent() {
        let devices = "Inter-|   Receive    |  Transmit\n face |bytes    packets\n    \
            lo:       9       9    0    0    0     0          0         0        9       9\n \
            cable:     100       3    0    0    0     0          0         0       20       2    0\n";
        assert_eq!(counted(devices), Some(120));
        assert_eq!(counted("    lo: 1 2 3 4 5 6 7 8 9"), None);
    }
}
