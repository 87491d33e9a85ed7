//! Published figures of other systems for CPU memory, and the simulation in the same shape.

use std::fmt::Write;

use anyhow::Result;

use super::costs::RDMA;
use super::{Shape, WAYS, bytes_of, leaders_barrier, time_of};

struct Published {
    system: &'static str,
    shape: Shape,
    /// Of an all-reduce; nothing for a barrier.
    bytes: Option<u64>,
    /// As it was published.
    time: &'static str,
    source: &'static str,
}

const fn published(
    system: &'static str,
    (hosts, lanes): (usize, usize),
    bytes: Option<u64>,
    time: &'static str,
    source: &'static str,
) -> Published {
    Published { system, shape: Shape { hosts, lanes }, bytes, time, source }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const RADIX: &str = "https://github.com/openucx/ucc/pull/915";
const HIER: &str = "https://github.com/openucx/ucc/pull/328";
const SHARP: &str = "https://github.com/openucx/ucc/issues/840";
const HDR100: &str = "https://github.com/openucx/ucc/issues/981";
const TUNED: &str = "https://github.com/openucx/ucc/pull/1082";

const ALL: [Published; 11] = [
    published("UCC, HCOLL", (8, 1), None, "3.27 – 4.98 µs", RADIX),
    published("UCC, HCOLL", (8, 64), None, "12.4 – 15.1 µs", RADIX),
    published("UCC", (4, 1), Some(8), "7.44 µs", SHARP),
    published("UCC", (4, 1), Some(16 * KIB), "25.4 µs", SHARP),
    published("UCC; with SHARP", (32, 40), Some(8), "14.9 – 15.3; 12.0 µs", HIER),
    published("UCC; with SHARP", (32, 40), Some(2 * KIB), "37.0 – 82.8; 31.9 µs", HIER),
    published("Open MPI, HCOLL", (4, 128), Some(8), "7.70 µs", HDR100),
    published("Open MPI, HCOLL", (4, 128), Some(16 * KIB), "47.3 µs", HDR100),
    published("Open MPI, HCOLL", (4, 128), Some(MIB), "1.52 ms", HDR100),
    published("UCC, Open MPI", (4, 32), Some(MIB), "580 µs – 3.71 ms", TUNED),
    published("UCC, Open MPI", (4, 32), Some(64 * MIB), "101 – 314 ms", TUNED),
];

/// Each with the fastest way of the simulation.
pub(super) fn table(text: &mut String) -> Result<()> {
    writeln!(text, "### Published figures of CPU memory, and the simulation in the same shape\n")?;
    writeln!(
        text,
        "| system | hosts × ranks | what | published | simulated, RDMA | fastest way |"
    )?;
    writeln!(text, "|---|--:|---|--:|--:|---|")?;
    for Published { system, shape, bytes, time, source } in &ALL {
        let (what, (ours, way)) = match bytes {
            None => ("barrier".to_owned(), (leaders_barrier(RDMA, *shape), "leaders")),
            Some(bytes) => (format!("all-reduce {}", bytes_of(*bytes)), fastest(*shape, *bytes)),
        };
        let Shape { hosts, lanes } = shape;
        let ours = time_of(ours);
        writeln!(
            text,
            "| [{system}]({source}) | {hosts} × {lanes} | {what} | {time} | {ours} | {way} |"
        )?;
    }
    writeln!(text)?;
    Ok(())
}

fn fastest(shape: Shape, bytes: u64) -> (u64, &'static str) {
    let times = WAYS.iter().map(|(name, run)| (run(RDMA, shape, bytes), *name));
    times.min().unwrap_or((0, "none"))
}
