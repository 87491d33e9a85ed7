//! The rows between hosts, each with what bare sockets take for the bytes that have to pass between two of them.

use anyhow::{Context, Result};
use symmem::{Group, Open};

use super::super::board::Board;
use super::super::measure::Case;
use super::super::settings::Settings;
use super::super::sockets::{Sockets, Way};
use super::{How, Measure, Measures, Row, barrier, collectives};

/// What has a form between hosts.
const ROWS: [&str; 8] = [
    "barrier",
    "put_signal",
    "put",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
];

/// Up to this size a put is measured with its way back, and from it on one way.
const SMALL: usize = 16 << 10;
/// The bytes with which a socket tells what a barrier does.
const FLAG: usize = 8;
const CHANNEL: usize = 0;

pub(in super::super) const PUT: Row = Row {
    name: "put",
    about: "with --hosts: data and a signal from the first host to the second",
    ranks: 2,
    how: How::InRanks,
    on_slices: false,
    on_devices: false,
    measures: Measures::BySize(|_, _| Vec::new()),
};

/// Whether the row of this name can be measured between hosts.
pub(in super::super) fn has(name: &str) -> bool {
    ROWS.contains(&name)
}

/// Whether the row of this name is data and a signal from one rank to another.
pub(in super::super) fn is_one_sided(name: &str) -> bool {
    matches!(name, "put_signal" | "put")
}

/// The lines of a row: bare sockets, and then the library, so that both run under the same conditions.
pub(super) fn measures(name: &'static str, settings: &Settings) -> Vec<Measure> {
    let both = |ours: Measure, way: Way, bytes: usize| {
        let ours = Measure { read: false, least: 3, one_way: way == Way::Stream, ..ours };
        let sockets = Measure {
            system: "sockets",
            memory: "-",
            algorithm: way.name(),
            wire: bytes,
            make: Some(make_sockets),
            ..ours.clone()
        };
        [sockets, ours]
    };
    let shape = settings.shape();
    match name {
        "barrier" => {
            let ours = barrier::ROW.fixed().iter().cloned();
            ours.flat_map(|ours| {
                both(Measure { floor: None, target: None, ..ours }, Way::Exchange, FLAG)
            })
            .collect()
        }
        "put_signal" | "put" => {
            let is_put = name == "put";
            let fits = |&bytes: &usize| {
                let wanted = if is_put { bytes >= SMALL } else { bytes <= SMALL };
                wanted && bytes.is_multiple_of(size_of::<u64>())
            };
            let sizes = settings.sizes().into_iter().filter(fits);
            let way = if is_put { Way::Stream } else { Way::RoundTrip };
            let one = |bytes| Measure {
                make: Some(make_put),
                ..collectives::sized(name, bytes, settings)
            };
            sizes.flat_map(|bytes| both(one(bytes), way, bytes)).collect()
        }
        _ => {
            let ours = collectives::library(name, settings).into_iter();
            ours.flat_map(|ours| {
                let way = if name == "broadcast" { Way::Stream } else { Way::Exchange };
                let bytes = shape.map_or(ours.bytes, |shape| must_pass(name, ours.bytes, shape));
                both(ours, way, bytes)
            })
            .collect()
        }
    }
}

/// How many ranks are on each of how many hosts.
pub(in super::super) type Shape = (usize, usize);

/// The bytes that a host has to receive at least for a collective of blocks of so many bytes.
fn must_pass(name: &str, bytes: usize, (ranks, hosts): Shape) -> usize {
    let others = hosts.saturating_sub(1);
    match name {
        // Of all-reduces that of a ring moves least.
        "all_reduce" => (2 * bytes * others).div_ceil(hosts),
        "reduce_scatter" => bytes * ranks,
        "all_gather" => bytes * ranks * others,
        "all_to_all" => bytes * ranks * ranks * others,
        _ => bytes,
    }
}

/// The first rank of the second host.
fn peer(group: &Group) -> Result<usize> {
    let hosts = group.hosts();
    let first = hosts.get(1).and_then(|ranks| ranks.first());
    first.copied().context("all ranks are on one host")
}

fn make_sockets<'a>(
    measure: &Measure,
    group: &'a Group,
    board: &'a Board<'a>,
) -> Result<Box<dyn Case + 'a>> {
    let way = Way::of(measure.algorithm);
    Ok(Box::new(Sockets::new(board, peer(group)?, way, measure.wire)?))
}

fn make_put<'a>(
    measure: &Measure,
    group: &'a Group,
    board: &'a Board<'a>,
) -> Result<Box<dyn Case + 'a>> {
    let words = measure.bytes / size_of::<u64>();
    let open = group.alloc::<u64>(words)?.rendezvous(group)?.open()?;
    let (first, second) = (0, peer(group)?);
    let data = vec![0; words];
    let there_and_back = measure.collective == "put_signal";
    Ok(Box::new(Put { open, board, first, second, data, there_and_back, count: 0 }))
}

/// Data and a signal from one rank to another.
struct Put<'a> {
    open: Open<u64>,
    board: &'a Board<'a>,
    first: usize,
    second: usize,
    data: Vec<u64>,
    there_and_back: bool,
    count: u64,
}

impl Put<'_> {
    fn send(&self, to: usize) -> Result<()> {
        let deadline = self.open.group().deadline();
        Ok(self.open.put_signal(to, 0, &self.data, CHANNEL, deadline)?)
    }

    fn receive(&self, from: usize) -> Result<()> {
        Ok(self.open.wait_signal(from, CHANNEL, self.open.group().deadline())?)
    }
}

impl Case for Put<'_> {
    /// Each sample has words of its own.
    fn prepare(&mut self) -> Result<()> {
        self.count += 1;
        let mark = if self.board.rank() == self.first { self.count } else { !self.count };
        self.data.fill(mark);
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        let rank = self.board.rank();
        if rank == self.first {
            self.send(self.second)?;
            return if self.there_and_back { self.receive(self.second) } else { Ok(()) };
        }
        if rank == self.second {
            self.receive(self.first)?;
            return if self.there_and_back { self.send(self.first) } else { Ok(()) };
        }
        Ok(())
    }

    fn check(&mut self) -> Result<bool> {
        let rank = self.board.rank();
        let expected = match rank {
            _ if rank == self.second => self.count,
            _ if rank == self.first && self.there_and_back => !self.count,
            _ => return Ok(true),
        };
        let mut got = vec![0; self.data.len()];
        self.open.get(rank, 0, &mut got)?;
        Ok(got.iter().all(|word| *word == expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_two_hosts_of_one_rank_a_block_passes_each_way() {
        for name in ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"] {
            assert_eq!(must_pass(name, 1024, (1, 2)), 1024, "{name}");
        }
        assert_eq!(must_pass("all_reduce", 1024, (2, 4)), 1536);
        assert_eq!(must_pass("all_gather", 1024, (2, 4)), 6 * 1024);
        assert_eq!(must_pass("all_to_all", 1024, (2, 2)), 4 * 1024);
    }
}
