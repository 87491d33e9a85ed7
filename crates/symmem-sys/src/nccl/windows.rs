//! Memory, registrations, windows, addresses of peers, and signals.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::collectives::Span;
use super::{
    Begun, Comm, ENDPOINTS, Handle, Nccl, Registration, Result, SIGNALS, WINDOWS, WaitSignal,
    Window, WindowFlags, int,
};
use crate::cuda::Stream;
use crate::table::written;

impl Nccl {
    /// `ncclMemAlloc`: so many bytes or more of the device whose context is current, in a way that suits windows.
    pub fn mem_alloc(&self, bytes: usize) -> Result<u64> {
        // SAFETY: it only writes the address.
        written(|address| unsafe { self.c.ncclMemAlloc(address, bytes) })
    }

    /// `ncclMemFree`
    ///
    /// # Safety
    ///
    /// The address is one of [`mem_alloc`](Self::mem_alloc), and neither it nor a window of it is used again.
    pub unsafe fn mem_free(&self, address: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclMemFree(address) }
    }

    /// `ncclCommRegister`: tells the communicator of memory that calls will often be given.
    ///
    /// # Safety
    ///
    /// The communicator is live, and so are the bytes there until it is deregistered.
    pub unsafe fn register(
        &self,
        comm: Comm,
        address: u64,
        bytes: usize,
    ) -> Result<Option<Registration>> {
        let comm = comm.raw();
        // SAFETY: as the caller promises; it writes the handle.
        written(|handle| unsafe { self.c.ncclCommRegister(comm, address, bytes, handle) })
            .map(Registration::given) // where registration does not help, the library gives none
    }

    /// `ncclCommDeregister`
    ///
    /// # Safety
    ///
    /// The communicator is live, and the registration is one of it that is not used again.
    pub unsafe fn deregister(&self, comm: Comm, registration: Registration) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclCommDeregister(comm.raw(), registration.raw()) }
    }

    /// `ncclCommWindowRegister` (2.27): a window onto as many bytes of every rank, all of whom call this.
    ///
    /// It makes none where windows are not supported: then collectives work all the same, but peers cannot be reached.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready, and so are the bytes there until the window is deregistered.
    pub unsafe fn window_register(
        &self,
        comm: Comm,
        address: u64,
        bytes: usize,
        flags: WindowFlags,
    ) -> Result<Begun<Window>> {
        self.needs("ncclCommWindowRegister", WINDOWS)?;
        let (comm, flags) = (comm.raw(), flags as c_int);
        // SAFETY: as the caller promises; it writes the handle, now or later.
        Begun::by(|slot| unsafe {
            self.c.ncclCommWindowRegister(comm, address, bytes, slot, flags)
        })
    }

    /// `ncclCommWindowDeregister` (2.27)
    ///
    /// # Safety
    ///
    /// The communicator is live, and the window is one of it that nobody uses again, neither a stream nor a peer.
    pub unsafe fn window_deregister(&self, comm: Comm, window: Window) -> Result<()> {
        self.needs("ncclCommWindowDeregister", WINDOWS)?;
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclCommWindowDeregister(comm.raw(), window.raw()) }
    }

    /// `ncclWinGetUserPtr` (2.29): the address that was registered.
    ///
    /// # Safety
    ///
    /// The communicator is live, and so is the window, of it.
    pub unsafe fn window_address(&self, comm: Comm, window: Window) -> Result<u64> {
        self.needs("ncclWinGetUserPtr", SIGNALS)?;
        // SAFETY: as the caller promises; it writes the address.
        written(|address| unsafe { self.c.ncclWinGetUserPtr(comm.raw(), window.raw(), address) })
    }

    /// `ncclGetPeerDevicePointer` (2.29): where this device finds the window of `peer`, a rank of the communicator; none
    /// where only the network leads there.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn peer_address(
        &self,
        window: Window,
        offset: usize,
        peer: usize,
    ) -> Result<Option<u64>> {
        self.needs("ncclGetPeerDevicePointer", SIGNALS)?;
        let (raw, peer) = (window.raw(), int(peer));
        // SAFETY: as the caller promises; it writes the address.
        let address =
            written(|at| unsafe { self.c.ncclGetPeerDevicePointer(raw, offset, peer, at) })?;
        Ok((address != 0).then_some(address))
    }

    /// `ncclGetLsaDevicePointer` (2.29): likewise, of the rank of this number among those that loads and stores reach.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn lsa_address(&self, window: Window, offset: usize, rank: usize) -> Result<u64> {
        self.needs("ncclGetLsaDevicePointer", SIGNALS)?;
        let (raw, rank) = (window.raw(), int(rank));
        // SAFETY: as the caller promises; it writes the address.
        written(|address| unsafe { self.c.ncclGetLsaDevicePointer(raw, offset, rank, address) })
    }

    /// `ncclGetLsaMultimemDevicePointer` (2.29): where one store reaches all ranks' windows; none without multicast.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn multimem_address(&self, window: Window, offset: usize) -> Result<Option<u64>> {
        self.needs("ncclGetLsaMultimemDevicePointer", SIGNALS)?;
        let window = window.raw();
        // SAFETY: as the caller promises; it writes the address.
        let address =
            written(|at| unsafe { self.c.ncclGetLsaMultimemDevicePointer(window, offset, at) })?;
        Ok((address != 0).then_some(address))
    }

    /// `ncclGetPeerDeviceLeInfo` (2.31.2): the endpoint by which kernels reach the window of `peer`, and the offset there.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn peer_endpoint(
        &self,
        window: Window,
        offset: usize,
        peer: usize,
    ) -> Result<(u32, usize)> {
        self.needs("ncclGetPeerDeviceLeInfo", ENDPOINTS)?;
        let (mut endpoint, mut at) = (0, 0);
        let (raw, peer) = (window.raw(), int(peer));
        // SAFETY: as the caller promises; it writes the two numbers.
        unsafe { self.c.ncclGetPeerDeviceLeInfo(raw, offset, peer, &mut endpoint, &mut at) }?;
        Ok((endpoint, at))
    }

    /// `ncclGetMultimemDeviceLeInfo` (2.31.2): likewise, of all ranks at once.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn multimem_endpoint(&self, window: Window, offset: usize) -> Result<(u32, usize)> {
        self.needs("ncclGetMultimemDeviceLeInfo", ENDPOINTS)?;
        let (mut endpoint, mut at) = (0, 0);
        // SAFETY: as the caller promises; it writes the two numbers.
        unsafe {
            self.c.ncclGetMultimemDeviceLeInfo(window.raw(), offset, &mut endpoint, &mut at)
        }?;
        Ok((endpoint, at))
    }

    /// `ncclPutSignal` (2.29): a copy into the peer's window, and then a signal, when the stream gets there.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready, the window is of it and as long, and the source is the stream's until it has passed.
    #[allow(clippy::too_many_arguments)] // as in C
    pub unsafe fn put_signal(
        &self,
        comm: Comm,
        from: u64,
        span: Span,
        peer: usize,
        window: Window,
        offset: usize,
        stream: Stream,
    ) -> Result<()> {
        self.needs("ncclPutSignal", SIGNALS)?;
        let (kind, peer, window) = (span.kind as c_int, int(peer), window.raw());
        let (comm, stream) = (comm.raw(), stream.raw());
        // SAFETY: as the caller promises. Signal, context and flags are 0, as there are no others yet.
        unsafe {
            self.c
                .ncclPutSignal(from, span.count, kind, peer, window, offset, 0, 0, 0, comm, stream)
        }
    }

    /// `ncclSignal` (2.29): a signal to the peer, when the stream gets there.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready, and so is the stream.
    pub unsafe fn signal(&self, comm: Comm, peer: usize, stream: Stream) -> Result<()> {
        self.needs("ncclSignal", SIGNALS)?;
        // SAFETY: as the caller promises. Signal, context and flags are 0, as there are no others yet.
        unsafe { self.c.ncclSignal(int(peer), 0, 0, 0, comm.raw(), stream.raw()) }
    }

    /// `ncclWaitSignal` (2.29): has the stream wait for these signals.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready, and so is the stream.
    pub unsafe fn wait_signal(
        &self,
        comm: Comm,
        signals: &[WaitSignal],
        stream: Stream,
    ) -> Result<()> {
        self.needs("ncclWaitSignal", SIGNALS)?;
        let mut signals = signals.to_vec();
        let (count, comm, stream) = (int(signals.len()), comm.raw(), stream.raw());
        // SAFETY: as the caller promises; it reads so many descriptions.
        unsafe { self.c.ncclWaitSignal(count, signals.as_mut_ptr(), comm, stream) }
    }
}
