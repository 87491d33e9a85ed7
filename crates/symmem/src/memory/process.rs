//! Memory for ranks that are threads of one process: all of them use the one mapping.

use super::region::Region;
use super::{Allocation, Backend, Device, Exported};
use crate::error::{Error, Result};

/// Ranks as threads of one process.
#[derive(Debug)]
pub struct Process;

impl Backend for Process {
    fn name(&self) -> &'static str {
        "process"
    }

    fn device(&self) -> Device {
        Device::Host
    }

    fn probe(&self) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Allocation> {
        super::host::check_available(bytes)?;
        let region = Region::anonymous(bytes)?;
        Ok(Allocation::of_host(region.clone(), move || Ok(Exported::Mapping(region.clone()))))
    }

    fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        match exported {
            Exported::Mapping(region) => region.part(0, bytes),
            Exported::Descriptor(_) | Exported::Bytes(_) => Err(Error::unavailable(
                "the process backend",
                "the peer is in another process; use the host backend",
            )),
        }
    }
}
