//! Multicast: an address at which a store reaches the memory of all ranks.
//!
//! Rank 0 makes the object, all add their device to it, then all bind their memory and map it. After each step all tell
//! how it went; if one could not do it, all go on without. Rank 0 keeps what it made until the end, for an object that
//! nobody holds is gone.
#![allow(unsafe_code)] // S1 (regions keep the mapping and what is bound), S4

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use symmem_sys::cuda::{HandleType, MulticastProperties};

use super::failed;
use super::gpu::{Gpu, InUse};
use super::memory::{Mapped, Physical};
use crate::backend::Exported;
use crate::block::Block;
use crate::error::{Error, Result};
use crate::group::{Group, no_descriptor};
use crate::region::Region;
use crate::symmetric::Handle;

/// Gives all ranks' parts of `handle` one address more; none, if one rank cannot. Collective.
pub(super) fn set_up(gpu: &Gpu, handle: &Handle, over_fabric: bool) -> Result<()> {
    let (group, (block, _)) = (handle.group(), handle.keep());
    let bytes = || gpu.whole(block.segment().bytes());
    let way = if over_fabric { HandleType::Fabric } else { HandleType::Fd };
    let make = || Made::new(gpu, bytes()?, group.size(), way);
    let made = (group.rank() == 0).then(make).transpose();
    let exported = |made: &Option<Made>| made.as_ref().map(|made| made.exported.try_clone());
    let Some((made, sent)) = agreed(group, &block, made, exported)? else { return Ok(()) };
    let joined = join(gpu, made.as_ref(), sent);
    let Some((object, _)) = agreed(group, &block, joined, |_| None)? else { return Ok(()) };
    let bound = bytes().and_then(|bytes| bind(gpu, object, &block, bytes));
    if let Some((region, _)) = agreed(group, &block, bound, |_| None)? {
        handle.set_multicast(region);
    }
    drop(made);
    Ok(())
}

/// Tells all how a step went here, and sends what `memory` finds in it. What came of the step here, and the memory that
/// rank 0 has sent; nothing on all ranks, if the step failed on one.
fn agreed<T>(
    group: &Group,
    block: &Block,
    step: Result<T>,
    memory: impl Fn(&T) -> Option<Result<Exported>>,
) -> Result<Option<(T, Option<Exported>)>> {
    let failure = step.as_ref().err().map(Error::to_string);
    let report = Report { failure, offset: block.offset() };
    let report = postcard::to_stdvec(&report).unwrap_or_default();
    let send = || step.as_ref().ok().and_then(&memory).transpose();
    let terms = [("operation", "multicast".to_owned())];
    let (failure, sent) = group.converse("rendezvous", group.deadline(), |conversation| {
        conversation.hold(&terms, report, send, |reports, memories| {
            Ok((Report::first_failure(&reports), memories.into_iter().next().flatten()))
        })
    })?;
    if let Some((rank, reason)) = failure {
        tracing::warn!("no multicast in {group:?}: rank {rank} could not set it up: {reason}");
        return Ok(None);
    }
    step.map(|done| Some((done, sent)))
}

/// How a step went.
#[derive(Serialize, Deserialize)]
struct Report {
    /// Why it failed, if it did.
    failure: Option<String>,
    /// Where the part begins in the memory that is bound: at the same place on all ranks, or one address cannot reach all.
    offset: usize,
}

impl Report {
    fn read(bytes: &[u8]) -> Self {
        postcard::from_bytes(bytes).unwrap_or_else(|e| {
            let failure = Some(format!("garbled report: {e}"));
            Self { failure, offset: 0 }
        })
    }

    /// The rank that could not go on, and why; the same on all.
    fn first_failure(reports: &[Vec<u8>]) -> Option<(usize, String)> {
        let first = Self::read(reports.first()?).offset;
        let why = |report: Self| {
            let elsewhere = || "its part lies elsewhere in its pool than that of rank 0".to_owned();
            report.failure.or_else(|| (report.offset != first).then(elsewhere))
        };
        let mut all = reports.iter().map(|report| Self::read(report)).enumerate();
        all.find_map(|(rank, report)| Some((rank, why(report)?)))
    }
}

/// What rank 0 makes for all.
struct Made {
    exported: Exported,
    _object: Physical,
}

impl Made {
    fn new(gpu: &Gpu, bytes: usize, ranks: usize, handle: HandleType) -> Result<Self> {
        let (driver, devices) = (gpu.driver(), ranks as u32);
        let properties = MulticastProperties { devices, bytes, handle };
        let memory = driver.multicast_create(&properties).map_err(failed)?;
        let object = Physical { gpu: gpu.clone(), memory };
        let exported = match handle {
            HandleType::Fabric => driver.export_fabric(memory).map(Exported::Fabric),
            _ => driver.export_fd(memory).map(Exported::Descriptor),
        };
        Ok(Self { exported: exported.map_err(failed)?, _object: object })
    }
}

/// The object, with our device in it.
fn join(gpu: &Gpu, made: Option<&Made>, sent: Option<Exported>) -> Result<Physical> {
    let exported = made.map(|made| &made.exported).or(sent.as_ref()).ok_or_else(no_descriptor)?;
    let object = Physical::import(gpu, exported)?;
    gpu.driver().multicast_add(object.memory, gpu.device()).map_err(failed)?;
    Ok(object)
}

/// The object at addresses of this process, with our memory as our device's part.
fn bind(gpu: &Gpu, object: Physical, own: &Block, bytes: usize) -> Result<Region> {
    let memory = gpu.driver().retain(own.region().address() as u64).map_err(failed)?;
    let memory = Physical { gpu: gpu.clone(), memory };
    let object = Arc::new(object);
    // SAFETY: S4: our own memory, all of it; whoever stores to the address may store to the memory, which is symmetric.
    unsafe { gpu.driver().multicast_bind(object.memory, 0, memory.memory, 0, bytes) }
        .map_err(failed)?;
    let bound = Bound { object: Arc::clone(&object), _memory: memory, bytes };
    let mapped = Mapped::new(object, bytes)?;
    let address = mapped.address();
    let everywhere = Everywhere { _mapped: mapped, _bound: bound };
    let all = Region::of_device(address, bytes, Box::new(InUse::new(gpu.clone(), everywhere)))?;
    all.part(own.offset(), own.region().bytes())
}

/// Memory as a part of an object, which goes after the mapping and before the memory.
struct Bound {
    object: Arc<Physical>,
    _memory: Physical,
    bytes: usize,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let Physical { gpu, memory } = &*self.object;
        // SAFETY: S4: bound in `bind`; nobody has the mapping of the object any more.
        let gone = unsafe { gpu.driver().multicast_unbind(*memory, gpu.device(), 0, self.bytes) };
        if let Err(e) = gone.map_err(failed) {
            tracing::warn!("{e}");
        }
    }
}

/// The fields go in this order.
struct Everywhere {
    _mapped: Mapped,
    _bound: Bound,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(reports: &[(Option<&str>, usize)]) -> Option<(usize, String)> {
        let card = |&(failure, offset): &(Option<&str>, usize)| {
            let report = Report { failure: failure.map(str::to_owned), offset };
            postcard::to_stdvec(&report).unwrap()
        };
        Report::first_failure(&reports.iter().map(card).collect::<Vec<_>>())
    }

    #[test]
    fn a_rank_that_failed_or_lies_elsewhere_is_named() {
        assert_eq!(first(&[(None, 128), (None, 128)]), None);
        assert_eq!(first(&[(None, 0), (Some("no"), 0)]), Some((1, "no".to_owned())));
        let (rank, why) = first(&[(None, 128), (None, 128), (None, 0)]).unwrap();
        assert!(rank == 2 && why.contains("elsewhere in its pool"), "{why}");
        let (rank, why) = Report::first_failure(&[vec![], vec![]]).unwrap();
        assert!(rank == 0 && why.contains("garbled"), "{why}");
    }
}
