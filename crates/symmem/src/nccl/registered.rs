//! Memory that a communicator has been told of.
#![allow(unsafe_code)] // S4, S5

use symmem_sys::nccl as sys;

use super::communicator::Communicator;
use super::group::check_closed;
use crate::error::Result;

/// Memory of this rank that a communicator knows, so that calls with it take shorter ways. Forgotten when dropped.
#[derive(Debug)]
#[must_use = "dropping it deregisters the memory"]
pub struct Registration {
    communicator: Communicator,
    raw: Option<sys::Registration>,
}

/// Memory of all ranks that was registered together. Given back when dropped.
#[derive(Debug)]
#[must_use = "dropping it gives the window back"]
pub struct Window {
    communicator: Communicator,
    raw: sys::Window,
}

impl Communicator {
    /// Tells the communicator of memory that calls will often be given.
    ///
    /// # Safety
    /// So many bytes are there, on its device, for as long as the value lives.
    pub unsafe fn register(&self, address: u64, bytes: usize) -> Result<Registration> {
        const OP: &str = "register";
        check_closed(OP, self.rank())?;
        let _calling = self.lock_calls();
        // SAFETY: S4: `ask` gives a communicator that is live; the caller vouches for the memory.
        let raw = self.ask(OP, |nccl, comm| unsafe { nccl.register(comm, address, bytes) })?;
        Ok(Registration { communicator: self.clone(), raw })
    }

    /// Registers memory of all ranks as a window, so that calls with it use the library's symmetric kernels. Collective; as
    /// many bytes on each, from an address that is a multiple of 4096. None where windows are not supported. Since 2.27.
    ///
    /// # Safety
    /// So many bytes are there, on its device, for as long as the value lives, and peers are not at work on them when it goes.
    pub unsafe fn window(&self, address: u64, bytes: usize) -> Result<Option<Window>> {
        const OP: &str = "window";
        check_closed(OP, self.rank())?;
        let _calling = self.lock_calls();
        let flags = sys::WindowFlags::CollSymmetric;
        let raw = self.begun(OP, |nccl, comm| {
            // SAFETY: S4: `begun` gives a communicator that is live; the caller vouches for the memory.
            unsafe { nccl.window_register(comm, address, bytes, flags) }
        })?;
        Ok(raw.map(|raw| Window { communicator: self.clone(), raw }))
    }
}

impl Window {
    pub(super) fn handle(&self) -> sys::Window {
        self.raw
    }

    /// The library's own handle (`ncclWindow_t`).
    pub fn raw(&self) -> usize {
        self.raw.raw()
    }

    /// Where this device finds the window of `peer`, `offset` bytes on; none where only the network leads there. Since 2.29.
    pub fn peer_address(&self, peer: usize, offset: usize) -> Result<Option<u64>> {
        const OP: &str = "peer_address";
        self.communicator.check_root(OP, peer)?;
        // SAFETY: S4: the window is live, and so is its communicator, or `ask` fails.
        self.communicator.ask(OP, |nccl, _| unsafe { nccl.peer_address(self.raw, offset, peer) })
    }

    /// Where one store reaches all ranks' windows; none without multicast. Since 2.29.
    pub fn multicast_address(&self, offset: usize) -> Result<Option<u64>> {
        const OP: &str = "multicast_address";
        // SAFETY: S4: likewise.
        self.communicator.ask(OP, |nccl, _| unsafe { nccl.multimem_address(self.raw, offset) })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(raw) = self.raw else { return };
        // SAFETY: S4: made by this communicator, and not used again. An aborted one has taken it along.
        self.communicator
            .ask("register", |nccl, comm| unsafe { nccl.deregister(comm, raw) })
            .unwrap_or_else(|e| tracing::debug!("{e}"));
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: S4: made by this communicator; the caller has vouched that nobody uses it. An aborted one has taken it along.
        self.communicator
            .ask("window", |nccl, comm| unsafe { nccl.window_deregister(comm, self.raw) })
            .unwrap_or_else(|e| tracing::debug!("{e}"));
    }
}
