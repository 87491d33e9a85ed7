//! Fabric handles: by which memory reaches every device on the same NVLink fabric, not only those of this machine.
//!
//! Memory is created for them wherever they can be had, and can be handed on as a descriptor all the same. A group uses
//! them if all its ranks can, and its pads have arrived that way; else it uses descriptors, which do not leave a host.

use std::sync::Arc;

use symmem_sys::cuda::{Attribute, Granularity, HandleType};

use super::Physical;
use crate::cuda::{Gpu, failed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::memory::block::Block;
use crate::symmetric::{Far, Handle, Offer};

impl Gpu {
    /// Whether memory of this device can be handed on by fabric handles. Found out once, by trying: a device may say yes
    /// and the driver no.
    pub(crate) fn has_fabric(&self) -> bool {
        *self.opened.fabric.get_or_init(|| {
            if !self.driver().has(Attribute::FabricHandles, self.device()) {
                return false;
            }
            let tried = self.try_fabric();
            if let Err(e) = &tried {
                tracing::info!("no fabric handles on {self:?}, descriptors are used: {e}");
            }
            tried.is_ok()
        })
    }

    fn try_fabric(&self) -> Result<()> {
        let properties = self.properties(HandleType::FdOrFabric);
        let bytes = self.driver().granularity(&properties, Granularity::Minimum).map_err(failed)?;
        let memory = Physical::new(self, self.driver().create(bytes, &properties))?;
        memory.export(true).map(drop)
    }

    /// How its memory can be handed on.
    pub(crate) fn handle_type(&self) -> HandleType {
        if self.has_fabric() { HandleType::FdOrFabric } else { HandleType::Fd }
    }
}

/// How memory of a group's ranks gets to the others. The same on all ranks.
#[derive(Debug)]
pub(crate) enum Way {
    Fabric,
    Descriptors,
    /// By descriptors within each host, and not at all to others, for this reason.
    WithinHosts(String),
}

/// Maps the pads of all ranks, over the fabric if each of them is `able` to, else by descriptors; and which it was. Those of ranks
/// that are reached by neither have no address.
pub(crate) fn map_pads(group: &Group, pads: &Arc<Block>, able: &[bool]) -> Result<(Handle, Way)> {
    let offer = Offer { far: Far::IfItCan, ..Offer::new(DType::U8) };
    let (why, is_strange) = match able.iter().position(|able| !able) {
        None => match Handle::offer(pads, group, &Offer { over_fabric: true, ..offer }) {
            Ok(handle) => return Ok((handle, Way::Fabric)),
            Err(
                e @ (Error::PeerLost { .. } | Error::Timeout { .. } | Error::Interrupted { .. }),
            ) => {
                return Err(e);
            }
            // It failed on all ranks, so all of them go on below.
            Err(e) => (e.to_string(), true),
        },
        Some(rank) => (format!("the device of rank {rank} has none"), able.contains(&true)),
    };
    let spans = group.spans_hosts();
    if is_strange {
        let hosts = if spans { ", which do not reach other hosts" } else { "" };
        tracing::warn!("no fabric handles in {group:?}, descriptors are used{hosts}: {why}");
    }
    let way = if spans { Way::WithinHosts(why) } else { Way::Descriptors };
    Ok((Handle::offer(pads, group, &offer)?, way))
}
