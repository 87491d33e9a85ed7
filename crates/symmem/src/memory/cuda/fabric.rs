//! Fabric handles: by which memory reaches every device on the same NVLink fabric, not only those of this machine.
//!
//! Memory is created for them wherever they can be had, and can be handed on as a descriptor all the same. A group uses
//! them if all its ranks can, and its pads have arrived that way; else it uses descriptors.

use std::sync::Arc;

use symmem_sys::cuda::{Attribute, Granularity, HandleType};

use super::Physical;
use crate::cuda::{Gpu, failed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::memory::block::Block;
use crate::symmetric::{Handle, Offer};

impl Gpu {
    /// Whether memory of this device can be handed on by fabric handles. Found out once, by trying: a device may say yes
    /// and the driver no.
    pub(crate) fn has_fabric(&self) -> bool {
        *self.fabric().get_or_init(|| {
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
        memory.export_fabric().map(drop)
    }

    /// How its memory can be handed on.
    pub(crate) fn handle_type(&self) -> HandleType {
        if self.has_fabric() { HandleType::FdOrFabric } else { HandleType::Fd }
    }
}

/// Maps the pads of all ranks, over the fabric if each of them is `able` to; and whether it was that.
pub(crate) fn map_pads(group: &Group, pads: &Arc<Block>, able: &[bool]) -> Result<(Handle, bool)> {
    match able.iter().position(|able| !able) {
        None => {
            match Handle::offer(pads, group, &Offer { over_fabric: true, ..Offer::new(DType::U8) })
            {
                Ok(handle) => return Ok((handle, true)),
                Err(e @ (Error::PeerLost { .. } | Error::Timeout { .. })) => return Err(e),
                // It failed on all ranks, so all of them go on below.
                Err(e) => {
                    tracing::warn!("no fabric handles in {group:?}, descriptors are used: {e}")
                }
            }
        }
        Some(rank) if able.contains(&true) => tracing::warn!(
            "no fabric handles in {group:?}, descriptors are used: the device of rank {rank} has none"
        ),
        Some(_) => {}
    }
    Ok((Handle::offer(pads, group, &Offer::new(DType::U8))?, false))
}
