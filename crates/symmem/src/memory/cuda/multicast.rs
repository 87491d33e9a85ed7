//! Multicast: an address at which a store reaches the memory of all ranks.
//!
//! Rank 0 makes the object, all add their device to it, then all bind their memory and map it. After each step all tell
//! how it went; if one could not do it, all go on without. Rank 0 keeps what it made until the end, for an object that
//! nobody holds is gone.
#![allow(unsafe_code)] // S1 (regions keep the mapping and what is bound), S4

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use symmem_sys::cuda::{HandleType, MulticastProperties};

use super::{Mapped, Physical};
use crate::cuda::{Gpu, failed};
use crate::error::{Error, Result};
use crate::group::{Group, no_descriptor};
use crate::memory::Exported;
use crate::memory::region::Region;
use crate::symmetric::Handle;

/// The address of all ranks' segments; none, if one rank cannot. Collective.
pub(crate) fn set_up(gpu: &Gpu, handle: &Handle, over_fabric: bool) -> Result<Option<Region>> {
    let (group, (block, _)) = (handle.group(), handle.keep());
    let bytes = || gpu.whole(block.segment().bytes());
    let way = if over_fabric { HandleType::Fabric } else { HandleType::Fd };
    let make = || Made::new(gpu, bytes()?, group.size(), way);
    let made = (group.rank() == 0).then(make).transpose();
    let exported = |made: &Option<Made>| made.as_ref().map(|made| made.exported.try_clone());
    let Some((made, sent)) = agreed(group, made, exported)? else { return Ok(None) };
    let joined = join(gpu, made.as_ref(), sent);
    let Some((object, _)) = agreed(group, joined, |_| None)? else { return Ok(None) };
    let bound = bytes().and_then(|bytes| bind(gpu, object, block.region(), bytes));
    let region = agreed(group, bound, |_| None)?.map(|(region, _)| region);
    drop(made);
    Ok(region)
}

/// Tells all how a step went here, and sends what `memory` finds in it. What came of the step here, and the memory that
/// rank 0 has sent; nothing on all ranks, if the step failed on one.
pub(crate) fn agreed<T>(
    group: &Group,
    step: Result<T>,
    memory: impl Fn(&T) -> Option<Result<Exported>>,
) -> Result<Option<(T, Option<Exported>)>> {
    let report = Report(step.as_ref().err().map(Error::to_string));
    let report = postcard::to_stdvec(&report).unwrap_or_default();
    let send = || step.as_ref().ok().and_then(&memory).transpose();
    let terms = [("operation", "multicast".to_owned())];
    let (failure, sent) = group.converse("rendezvous", group.deadline(), |conversation| {
        conversation.hold(&terms, report, send, |reports, memories| {
            let failures = reports.iter().map(|report| Report::read(report)).enumerate();
            let failure = failures.filter_map(|(rank, report)| Some((rank, report.0?))).next();
            Ok((failure, memories.into_iter().next().flatten()))
        })
    })?;
    if let Some((rank, reason)) = failure {
        tracing::warn!("no multicast in {group:?}: rank {rank} could not set it up: {reason}");
        return Ok(None);
    }
    step.map(|done| Some((done, sent)))
}

/// How a step went: why it failed, if it did.
#[derive(Serialize, Deserialize)]
struct Report(Option<String>);

impl Report {
    fn read(bytes: &[u8]) -> Self {
        postcard::from_bytes(bytes).unwrap_or_else(|e| Self(Some(format!("garbled report: {e}"))))
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
        let object = Physical::new(gpu, driver.multicast_create(&properties))?;
        let exported = object.export(handle == HandleType::Fabric)?;
        Ok(Self { exported, _object: object })
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
fn bind(gpu: &Gpu, object: Physical, own: &Region, bytes: usize) -> Result<Region> {
    let memory = Physical::at(gpu, own.address() as u64)?;
    let object = Arc::new(object);
    // SAFETY: S4: our own memory, all of it; all that may store to the address may store to the memory, which is symmetric.
    unsafe { gpu.driver().multicast_bind(object.memory, 0, memory.memory, 0, bytes) }
        .map_err(failed)?;
    let bound = Bound { object: Arc::clone(&object), _memory: memory, bytes };
    let mapped = Mapped::new(object, bytes)?;
    let address = mapped.address();
    let bound = BoundMapping { _mapped: mapped, _bound: bound };
    Region::of_device(address, bytes, gpu.in_use(bound))
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
        gone.map_err(failed).unwrap_or_else(|e| tracing::warn!("{e}"));
    }
}

/// The fields go in this order.
struct BoundMapping {
    _mapped: Mapped,
    _bound: Bound,
}
