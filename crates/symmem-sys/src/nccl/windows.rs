//! Memory, registrations, windows, addresses of peers, and signals.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::collectives::Span;
use super::{
    Begun, Comm, ENDPOINTS, Handle, Nccl, Registration, Result, SIGNALS, WINDOWS, WaitSignal,
    Window, WindowFlags, int,
};
use crate::cuda::Stream;
use crate::table::{given, methods};

impl Nccl {
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

    methods! {
        /// `ncclMemAlloc`: so many bytes or more of the device whose context is current, in a way that suits windows.
        // It only writes the address.
        pub fn mem_alloc(bytes: usize) -> u64 = |address| ncclMemAlloc(address, bytes);

        /// `ncclMemFree`
        ///
        /// # Safety
        ///
        /// The address is one of [`mem_alloc`](Self::mem_alloc), and neither it nor a window of it is used again.
        pub unsafe fn mem_free(address: u64) = ncclMemFree(address);

        /// `ncclCommRegister`: tells the communicator of memory that calls will often be given.
        ///
        /// # Safety
        ///
        /// The communicator is live, and so are the bytes there until it is deregistered.
        // Where registration does not help, the library gives none.
        pub unsafe fn register(comm: Comm, address: u64, bytes: usize) -> Option<Registration> =
            |handle| ncclCommRegister(comm.raw(), address, bytes, handle) => Registration::given;

        /// `ncclCommDeregister`
        ///
        /// # Safety
        ///
        /// The communicator is live, and the registration is one of it that is not used again.
        pub unsafe fn deregister(comm: Comm, registration: Registration) =
            ncclCommDeregister(comm.raw(), registration.raw());

        /// `ncclCommWindowDeregister` (2.27)
        ///
        /// # Safety
        ///
        /// The communicator is live, and the window is one of it that nobody uses again, neither a stream nor a peer.
        pub unsafe fn window_deregister(comm: Comm, window: Window) =
            ncclCommWindowDeregister(comm.raw(), window.raw()) since WINDOWS;

        /// `ncclWinGetUserPtr` (2.29): the address that was registered.
        ///
        /// # Safety
        ///
        /// The communicator is live, and so is the window, of it.
        pub unsafe fn window_address(comm: Comm, window: Window) -> u64 =
            |address| ncclWinGetUserPtr(comm.raw(), window.raw(), address) since SIGNALS;

        /// `ncclGetPeerDevicePointer` (2.29): where this device finds the window of `peer`, a rank of the communicator; none
        /// where only the network leads there.
        ///
        /// # Safety
        ///
        /// The window is live.
        pub unsafe fn peer_address(window: Window, offset: usize, peer: usize) -> Option<u64> =
            |address| ncclGetPeerDevicePointer(window.raw(), offset, int(peer), address)
            since SIGNALS => given;

        /// `ncclGetLsaDevicePointer` (2.29): likewise, of the rank of this number among those that loads and stores reach.
        ///
        /// # Safety
        ///
        /// The window is live.
        pub unsafe fn lsa_address(window: Window, offset: usize, rank: usize) -> u64 =
            |address| ncclGetLsaDevicePointer(window.raw(), offset, int(rank), address)
            since SIGNALS;

        /// `ncclGetLsaMultimemDevicePointer` (2.29): where one store reaches all ranks' windows; none without multicast.
        ///
        /// # Safety
        ///
        /// The window is live.
        pub unsafe fn multimem_address(window: Window, offset: usize) -> Option<u64> =
            |address| ncclGetLsaMultimemDevicePointer(window.raw(), offset, address)
            since SIGNALS => given;

        /// `ncclPutSignal` (2.29): a copy into the peer's window, and then a signal, when the stream gets there.
        ///
        /// # Safety
        ///
        /// The communicator is live and ready, the window is of it and as long, and the source is the stream's until it has passed.
        // Signal, context and flags are 0, as there are no others yet.
        #[allow(clippy::too_many_arguments)] // as in C
        pub unsafe fn put_signal(
            comm: Comm, from: u64, span: Span, peer: usize, window: Window, offset: usize,
            stream: Stream,
        ) = ncclPutSignal(
            from, span.count, span.kind as c_int, int(peer), window.raw(), offset, 0, 0, 0,
            comm.raw(), stream.raw(),
        ) since SIGNALS;

        /// `ncclSignal` (2.29): a signal to the peer, when the stream gets there.
        ///
        /// # Safety
        ///
        /// The communicator is live and ready, and so is the stream.
        // Signal, context and flags are 0, as there are no others yet.
        pub unsafe fn signal(comm: Comm, peer: usize, stream: Stream) =
            ncclSignal(int(peer), 0, 0, 0, comm.raw(), stream.raw()) since SIGNALS;
    }
}
