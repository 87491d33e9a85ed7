//! On which devices the ranks of a group are, and what follows from that for all of them alike.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use symmem_sys::cuda::Attribute;

use crate::cuda::device::gpu::Gpu;
use crate::cuda::group::comm::OP;
use crate::error::Result;
use crate::group::Group;

/// More ranks than any device has room for.
const MOST_RANKS: usize = 1 << 16;

/// Where a rank is.
#[derive(Serialize, Deserialize)]
pub(in crate::cuda) struct Placement {
    device: [u8; 16],
    /// What decides how many blocks of a kernel fit.
    kind: (i32, i32, u32),
    /// Bytes of the cache that all multiprocessors share.
    cache: usize,
    can_multicast: bool,
    pub(in crate::cuda) has_fabric: bool,
    /// It wants no two ranks on one device.
    strict: bool,
    /// How many ranks use a device, as it was told.
    ranks_per_device: Option<usize>,
    /// How many ranks its machine has.
    ranks_here: usize,
}

impl Placement {
    pub(in crate::cuda) fn new(group: &Group, gpu: &Gpu) -> Self {
        let (major, minor) = gpu.opened.capability;
        let rules = &group.context().devices;
        Self {
            device: gpu.uuid(),
            kind: (major, minor, gpu.opened.multiprocessors),
            cache: gpu.opened.cache,
            can_multicast: gpu.driver().has(Attribute::Multicast, gpu.device()),
            has_fabric: gpu.has_fabric(),
            strict: rules.strict,
            ranks_per_device: rules.ranks,
            ranks_here: rules.ranks_here,
        }
    }
}

/// Refuses ranks on one device, if one of them wants that. The same on all ranks.
pub(in crate::cuda) fn check_apart(group: &Group, placements: &[Placement]) -> Result<()> {
    let Some(strict) = placements.iter().position(|p| p.strict) else { return Ok(()) };
    let mut first = HashMap::new();
    for (rank, placement) in placements.iter().enumerate() {
        if let Some(other) = first.insert(placement.device, rank) {
            let expected = format!("a device of its own for each rank, as rank {strict} wants");
            let got = format!("ranks {other} and {rank} both on {}", uuid(placement.device));
            return Err(group.usage(OP, expected, got));
        }
    }
    Ok(())
}

/// As `nvidia-smi` writes it.
fn uuid(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    let parts = [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)];
    format!("GPU-{}", parts.join("-"))
}

/// The number of multiprocessors of the smallest device, unless all devices are alike: a block of any kernel fits on each.
pub(in crate::cuda) fn smallest_if_unlike(placements: &[Placement]) -> Option<u32> {
    let alike = placements.windows(2).all(|pair| pair[0].kind == pair[1].kind);
    let smallest = placements.iter().map(|placement| placement.kind.2).min();
    smallest.filter(|_| !alike)
}

/// The smallest device's cache.
pub(in crate::cuda) fn smallest_cache(placements: &[Placement]) -> usize {
    placements.iter().map(|placement| placement.cache).min().unwrap_or(0)
}

/// The most ranks on one device.
pub(in crate::cuda) fn most_on_one(placements: &[Placement]) -> usize {
    let on = |device| placements.iter().filter(|placement| placement.device == device).count();
    placements.iter().map(|placement| on(placement.device)).max().unwrap_or(1)
}

/// The most ranks that may have kernels on one device at once, which must all fit on it: the same on all ranks.
///
/// Where ranks of the group share a device, those of its host that are not in it may be there, too, for all that is known.
/// A rank that has a device to itself leaves half of it free: something else may wait for its kind there, such as another group's
/// kernels, or NCCL's.
pub(in crate::cuda) fn ranks_per_device(group: &Group, placements: &[Placement]) -> usize {
    let here = most_on_one(placements);
    let told = placements.iter().filter_map(|placement| placement.ranks_per_device).max();
    let others = |members: &Vec<usize>| {
        let of_host = members.iter().filter_map(|&rank| placements.get(rank));
        let everyone = of_host.map(|placement| placement.ranks_here).max().unwrap_or(0);
        everyone.saturating_sub(members.len())
    };
    let others = group.hosts().iter().map(others).max().unwrap_or(0);
    let seen = if here > 1 { here + others } else { 2 };
    told.unwrap_or(seen).min(MOST_RANKS)
}

/// Whether all ranks have devices of their own that can be reached at once.
pub(in crate::cuda) fn has_multicast(group: &Group, placements: &[Placement]) -> bool {
    let devices: HashSet<_> = placements.iter().map(|placement| placement.device).collect();
    let can = placements.iter().filter(|placement| placement.can_multicast).count();
    let apart = devices.len() == placements.len() && placements.len() > 1;
    if apart && can > 0 && can < placements.len() {
        let without = placements.iter().position(|placement| !placement.can_multicast).unwrap_or(0);
        tracing::warn!("no multicast in {group:?}: the device of rank {without} cannot");
    }
    apart && can == placements.len()
}
