//! Memory from NCCL. It is the driver's own kind, created so that it can be exported; so peers map it as they map ours:
//! see `docs/decisions/0012-addresses-of-nccl-memory.md`.
#![allow(unsafe_code)] // S1, S4, S5

use std::sync::Arc;

use super::cuda::{DeviceBackend, Physical, as_its_gpu};
use super::region::Region;
use super::{Allocation, Backend, Exported};
use crate::cuda::Gpu;
use crate::error::{Error, Result};
use crate::nccl::{Feature, Nccl, failed, register_windows, warn};
use crate::symmetric::Handle;

const OP: &str = "alloc";

/// NCCL as a backend.
pub(super) struct NcclMemory {
    nccl: Nccl,
    gpu: Gpu,
}

impl NcclMemory {
    pub(super) fn new(nccl: &Nccl, gpu: &Gpu) -> Result<Arc<Self>> {
        if !nccl.has(Feature::Windows) {
            let (major, minor) = Feature::Windows.since();
            let why = format!("it requires NCCL {major}.{minor}, and this is {}", nccl.version());
            return Err(Error::unavailable("symmetric memory of NCCL", why));
        }
        Ok(Arc::new(Self { nccl: nccl.clone(), gpu: gpu.of_driver() }))
    }
}

impl DeviceBackend for NcclMemory {
    fn has_network(&self) -> bool {
        true
    }

    fn mapped(&self, handle: &Handle) -> Result<()> {
        register_windows(&self.nccl, &self.gpu, handle)
    }
}

/// What one `ncclMemAlloc` gave.
struct Held {
    nccl: Nccl,
    gpu: Gpu,
    address: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: S1: nobody has a region of it, nor a window, which has one; nothing runs that uses it.
        warn(self.gpu.within(|| unsafe { self.nccl.library().mem_free(self.address) }));
    }
}

/// Without virtual memory, NCCL takes memory that cannot be handed on.
fn not_exported(error: Error) -> Error {
    let why = format!("{error}; is NCCL_CUMEM_ENABLE 0?");
    Error::unavailable("memory of NCCL that peers can map", why)
}

impl Backend for NcclMemory {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn probe(&self) -> Result<()> {
        self.allocate(1).map(drop)
    }

    fn allocate(&self, bytes: usize) -> Result<Allocation> {
        let (gpu, nccl) = (&self.gpu, &self.nccl);
        let made = gpu.within(|| nccl.library().mem_alloc(bytes))?;
        let address = made.map_err(|failure| failed(OP, None, &failure))?;
        let held = Held { nccl: nccl.clone(), gpu: gpu.clone(), address };
        // Peers map all of it, so they are told how much it is.
        let range = gpu.call(|driver| driver.pointer_info(address))?;
        let whole = (range.base + range.bytes as u64).saturating_sub(address) as usize;
        let whole = whole.max(bytes);
        let region = Region::of_device(address, whole, gpu.in_use(held))?;
        gpu.clear(&region, 0, whole)?;
        let gpu = gpu.clone();
        Ok(Allocation::new(region, move |over_fabric| {
            let memory = Physical::at(&gpu, address);
            memory.and_then(|memory| memory.export(over_fabric)).map_err(not_exported)
        }))
    }

    fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        self.gpu.import(exported, bytes)
    }

    as_its_gpu!(|self| self.gpu);
}
