//! `cargo xtask scale`: how long barriers and all-reduces take on many hosts, by simulation. Prints the tables of
//! `docs/scale.md`.

mod costs;
mod flat;
mod leaders;
mod limits;
mod network;
mod published;
mod rails;

use std::fmt::Write;

use anyhow::{Result, bail};

use self::costs::{Costs, MESH, RDMA, TCP};
use self::flat::Flat;
use self::leaders::Leaders;
use self::limits::Limits;
use self::network::{Network, Program};
use self::rails::{Chain, Ring, TwoHop};
use crate::command::root;
use crate::{Arguments, Outcome};

const PAGE: &str = "docs/scale.md";
const HOSTS: [usize; 3] = [8, 64, 1024];
/// Ranks of a host.
const LANES: usize = 8;
const SIZES: [u64; 4] = [8, 16 << 10, 1 << 20, 64 << 20];
/// Of more ranks than these, those of a host stand for each other where all do the same.
const APART: usize = 1024;
/// How many pieces of a long all-reduce are simulated; each further one takes as long as the last of them.
const PIECES: u64 = 2;

/// Time of an all-reduce of so many bytes.
type AllReduce = fn(Costs, Shape, u64) -> u64;

/// Time of a barrier.
type Barrier = fn(Costs, Shape) -> u64;

/// The ways to all-reduce, with their names.
const WAYS: [(&str, AllReduce); 6] = [
    ("flat", flat_all_reduce),
    ("leaders", |costs, shape, bytes| apart(costs, shape, |net| Leaders::doubling(net, bytes))),
    ("raw", |costs, shape, bytes| apart(costs, shape, |net| Leaders::raw(net, bytes))),
    ("two-hop", |costs, shape, bytes| alike(costs, shape, |net| TwoHop::new(net, bytes))),
    ("chain", |costs, shape, bytes| apart(costs, shape, |net| Chain::new(net, bytes))),
    ("ring", |costs, shape, bytes| alike(costs, shape, |net| Ring::new(net, bytes))),
];

/// How many hosts there are, and how many ranks each has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    hosts: usize,
    lanes: usize,
}

/// Prints the tables, or checks that the page has them.
pub(crate) fn scale(mut arguments: Arguments) -> Result<Outcome> {
    let checks = arguments.flag("--check");
    arguments.finish()?;
    let tables = tables()?;
    print!("{tables}");
    if checks && !std::fs::read_to_string(root().join(PAGE))?.contains(&tables) {
        bail!("{PAGE} does not have these tables");
    }
    Ok(Outcome::Done)
}

fn tables() -> Result<String> {
    let mut text = String::new();
    barriers(&mut text)?;
    published::table(&mut text)?;
    for hosts in HOSTS {
        all_reduces(&mut text, hosts)?;
    }
    writeln!(text, "### What a rank has today\n")?;
    writeln!(
        text,
        "| hosts | TCP connections of a rank | channels | pad | mirrors of a rank | of a host | handshakes of the job | reads of its \
         store |"
    )?;
    writeln!(text, "|--:|--:|--:|--:|--:|--:|--:|--:|")?;
    for hosts in HOSTS {
        writeln!(text, "{}", Limits::of(hosts as u64).row(hosts as u64))?;
    }
    Ok(text)
}

fn barriers(text: &mut String) -> Result<()> {
    writeln!(text, "### Barrier\n")?;
    writeln!(text, "| way | wire |{} |", HOSTS.map(|hosts| format!(" {hosts} hosts")).join(" |"))?;
    writeln!(text, "|---|---|{}", "--:|".repeat(HOSTS.len()))?;
    let ways: [(_, _, _, Barrier); 5] = [
        ("flat, mesh", "TCP", MESH, flat_barrier),
        ("flat", "TCP", TCP, flat_barrier),
        ("leaders", "TCP", TCP, leaders_barrier),
        ("flat", "RDMA", RDMA, flat_barrier),
        ("leaders", "RDMA", RDMA, leaders_barrier),
    ];
    for (name, wire, costs, run) in ways {
        let time = |hosts| time_of(run(costs, Shape { hosts, lanes: LANES }));
        let times = HOSTS.map(|hosts| format!(" {}", time(hosts))).join(" |");
        writeln!(text, "| {name} | {wire} |{times} |")?;
    }
    writeln!(text)?;
    Ok(())
}

fn all_reduces(text: &mut String, hosts: usize) -> Result<()> {
    writeln!(text, "### All-reduce, {hosts} hosts × {LANES} ranks\n")?;
    writeln!(
        text,
        "| way | wire |{} |",
        SIZES.map(|size| format!(" {}", bytes_of(size))).join(" |")
    )?;
    writeln!(text, "|---|---|{}", "--:|".repeat(SIZES.len()))?;
    let shape = Shape { hosts, lanes: LANES };
    let mut row = |name: &str, wire: &str, run: &dyn Fn(u64) -> u64| {
        let times = SIZES.map(|size| format!(" {}", time_of(run(size)))).join(" |");
        writeln!(text, "| {name} | {wire} |{times} |")
    };
    row("flat, mesh", "TCP", &|size| flat_all_reduce(MESH, shape, size))?;
    for (wire, costs) in [("TCP", TCP), ("RDMA", RDMA)] {
        for (name, run) in WAYS {
            row(name, wire, &|size| run(costs, shape, size))?;
        }
    }
    writeln!(text)?;
    Ok(())
}

fn flat_barrier(costs: Costs, shape: Shape) -> u64 {
    alike(costs, shape, Flat::barrier)
}

fn leaders_barrier(costs: Costs, shape: Shape) -> u64 {
    apart(costs, shape, Leaders::barrier)
}

/// Time of a program.
fn apart<P: Program>(costs: Costs, shape: Shape, program: impl Fn(&Network) -> P) -> u64 {
    let mut net = Network::new(costs, shape.hosts, shape.lanes, 1);
    let mut program = program(&net);
    net.run(&mut program)
}

/// Time of a program in which all ranks of a host do the same.
fn alike<P: Program>(costs: Costs, shape: Shape, program: impl Fn(&Network) -> P) -> u64 {
    let mut net = folded(costs, shape);
    let mut program = program(&net);
    net.run(&mut program)
}

fn folded(costs: Costs, Shape { hosts, lanes }: Shape) -> Network {
    let (lanes, weight) = if hosts * lanes > APART { (1, lanes) } else { (lanes, 1) };
    Network::new(costs, hosts, lanes, weight)
}

fn flat_all_reduce(costs: Costs, shape: Shape, bytes: u64) -> u64 {
    let run = |most| {
        let mut net = folded(costs, shape);
        let (mut program, simulated, pieces) = Flat::all_reduce(&net, bytes, most);
        (net.run(&mut program), simulated, pieces)
    };
    let (time, simulated, pieces) = run(PIECES);
    if simulated == pieces {
        return time;
    }
    let (before, ..) = run(simulated - 1);
    time + (pieces - simulated) * (time - before)
}

/// A time of so many picoseconds, in three digits.
fn time_of(time: u64) -> String {
    let units = [(1e6, "µs"), (1e9, "ms"), (1e12, "s")];
    let time = time as f64;
    let (unit, name) = units.into_iter().rfind(|(unit, _)| time >= *unit).unwrap_or(units[0]);
    let value = time / unit;
    match value {
        ..9.995 => format!("{value:.2} {name}"),
        ..99.95 => format!("{value:.1} {name}"),
        _ => format!("{value:.0} {name}"),
    }
}

fn bytes_of(bytes: u64) -> String {
    match bytes {
        0..1_024 => format!("{bytes} B"),
        1_024..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests;
