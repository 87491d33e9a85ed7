//! Memory, registrations, windows, addresses of peers, and signals.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::collectives::Span;
use super::{
    Begun, Comm, ENDPOINTS, Handle, Nccl, Registration, Result, SIGNALS, WINDOWS, WaitSignal,
    Window, WindowFlags, int,
};
use crate::cuda::Stream;

impl Nccl {
    /// `ncclMemAlloc`: so many bytes or more of the device whose context is current, in a way that suits windows.
    pub fn mem_alloc(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: it only writes the address.
        self.explained(unsafe { self.c.ncclMemAlloc(&mut address, bytes) })?;
        Ok(address)
    }

    /// `ncclMemFree`
    ///
    /// # Safety
    ///
    /// The address is one of [`mem_alloc`](Self::mem_alloc), and neither it nor a window of it is used again.
    pub unsafe fn mem_free(&self, address: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        self.explained(unsafe { self.c.ncclMemFree(address) })
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
        let mut handle = 0;
        // SAFETY: as the caller promises; it writes the handle.
        let done = unsafe { self.c.ncclCommRegister(comm.raw(), address, bytes, &mut handle) };
        self.explained(done)?;
        // Where registration does not help, the library gives none.
        Ok(Registration::given(handle))
    }

    /// `ncclCommDeregister`
    ///
    /// # Safety
    ///
    /// The communicator is live, and the registration is one of it that is not used again.
    pub unsafe fn deregister(&self, comm: Comm, registration: Registration) -> Result<()> {
        // SAFETY: as the caller promises.
        self.explained(unsafe { self.c.ncclCommDeregister(comm.raw(), registration.raw()) })
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
        let begun = Begun::new();
        let (comm, slot, flags) = (comm.raw(), begun.slot(), flags as c_int);
        // SAFETY: as the caller promises; it writes the handle, now or later.
        let done = unsafe { self.c.ncclCommWindowRegister(comm, address, bytes, slot, flags) };
        self.begun(done, begun)
    }

    /// `ncclCommWindowDeregister` (2.27)
    ///
    /// # Safety
    ///
    /// The communicator is live, and the window is one of it that nobody uses again, neither a stream nor a peer.
    pub unsafe fn window_deregister(&self, comm: Comm, window: Window) -> Result<()> {
        self.needs("ncclCommWindowDeregister", WINDOWS)?;
        // SAFETY: as the caller promises.
        self.explained(unsafe { self.c.ncclCommWindowDeregister(comm.raw(), window.raw()) })
    }

    /// `ncclWinGetUserPtr` (2.29): the address that was registered.
    ///
    /// # Safety
    ///
    /// The communicator is live, and so is the window, of it.
    pub unsafe fn window_address(&self, comm: Comm, window: Window) -> Result<u64> {
        self.needs("ncclWinGetUserPtr", SIGNALS)?;
        let mut address = 0;
        // SAFETY: as the caller promises; it writes the address.
        let done = unsafe { self.c.ncclWinGetUserPtr(comm.raw(), window.raw(), &mut address) };
        self.explained(done)?;
        Ok(address)
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
        let mut address = 0;
        let (raw, peer) = (window.raw(), int(peer));
        // SAFETY: as the caller promises; it writes the address.
        let done = unsafe { self.c.ncclGetPeerDevicePointer(raw, offset, peer, &mut address) };
        self.explained(done)?;
        Ok((address != 0).then_some(address))
    }

    /// `ncclGetLsaDevicePointer` (2.29): likewise, of the rank of this number among those that loads and stores reach.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn lsa_address(&self, window: Window, offset: usize, rank: usize) -> Result<u64> {
        self.needs("ncclGetLsaDevicePointer", SIGNALS)?;
        let mut address = 0;
        let (raw, rank) = (window.raw(), int(rank));
        // SAFETY: as the caller promises; it writes the address.
        let done = unsafe { self.c.ncclGetLsaDevicePointer(raw, offset, rank, &mut address) };
        self.explained(done)?;
        Ok(address)
    }

    /// `ncclGetLsaMultimemDevicePointer` (2.29): where one store reaches all ranks' windows; none without multicast.
    ///
    /// # Safety
    ///
    /// The window is live.
    pub unsafe fn multimem_address(&self, window: Window, offset: usize) -> Result<Option<u64>> {
        let call = "ncclGetLsaMultimemDevicePointer";
        self.needs(call, SIGNALS)?;
        let mut address = 0;
        // SAFETY: as the caller promises; it writes the address.
        let done =
            unsafe { self.c.ncclGetLsaMultimemDevicePointer(window.raw(), offset, &mut address) };
        self.explained(done)?;
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
        let done =
            unsafe { self.c.ncclGetPeerDeviceLeInfo(raw, offset, peer, &mut endpoint, &mut at) };
        self.explained(done)?;
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
        let done = unsafe {
            self.c.ncclGetMultimemDeviceLeInfo(window.raw(), offset, &mut endpoint, &mut at)
        };
        self.explained(done)?;
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
        let done = unsafe {
            self.c
                .ncclPutSignal(from, span.count, kind, peer, window, offset, 0, 0, 0, comm, stream)
        };
        self.explained(done)
    }

    /// `ncclSignal` (2.29): a signal to the peer, when the stream gets there.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready, and so is the stream.
    pub unsafe fn signal(&self, comm: Comm, peer: usize, stream: Stream) -> Result<()> {
        self.needs("ncclSignal", SIGNALS)?;
        // SAFETY: as the caller promises. Signal, context and flags are 0, as there are no others yet.
        let done = unsafe { self.c.ncclSignal(int(peer), 0, 0, 0, comm.raw(), stream.raw()) };
        self.explained(done)
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
        let done = unsafe { self.c.ncclWaitSignal(count, signals.as_mut_ptr(), comm, stream) };
        self.explained(done)
    }
}
