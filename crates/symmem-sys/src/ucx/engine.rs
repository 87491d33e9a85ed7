//! Active messages between processes, as a trait that the real and the fake engine implement.
//!
//! - A **message** is a header of at most [`MAX_HEADER`] bytes and a body of any size. A message arrives once and complete, or
//!   not at all. Messages may arrive in any order. If the receiver needs to know the sender, the header must contain it.
//! - An **endpoint** is the connection to one peer. If it fails, the engine calls [`Events::failed`], all messages posted to it
//!   end with a failure, and the engine closes it.
//! - **Events** are called only by [`progress`](Engine::progress), `post`, `close` and `shutdown`, on the thread that calls these,
//!   one at a time. Calls of an engine from within an event are refused. A panic in an event ends the engine.
//!
//! Several threads may use an engine. `progress` returns at once if another thread is in it.
#![allow(unsafe_code)] // S1, S2: bodies and receive buffers

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::{Failure, Result, Version};

/// The most bytes of a header.
pub const MAX_HEADER: usize = 256;

/// The settings of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Which transports to use, as `UCX_TLS` names them. Default: all except those for shared memory and for devices.
    pub transports: Option<String>,
    /// Which network devices to use, as `UCX_NET_DEVICES` names them, such as `eth0`. Default: all.
    pub devices: Option<String>,
    /// Whether to connect to peers with another version of UCX.
    pub mixed_versions: bool,
}

/// A connection to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint(pub(super) usize);

/// The state of a message after `post`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It was sent and its body is free. No event follows.
    Sent,
    /// [`Events::sent`] will be called.
    Pending,
}

/// Active messages of one process.
pub trait Engine: fmt::Debug + Send + Sync {
    /// The library's version.
    fn version(&self) -> Version;

    /// The address with which peers [`connect`](Self::connect) to this engine: some 100 bytes.
    fn address(&self) -> &[u8];

    /// `ucp_ep_create`: connects to the engine with this address. If there is no such engine, the endpoint fails later.
    ///
    /// Fails if the address is damaged or from another version of UCX.
    fn connect(&self, address: &[u8]) -> Result<Endpoint>;

    /// `ucp_am_send_nbx`: posts a message. It never waits.
    ///
    /// After [`Posted::Pending`], [`Events::sent`] gets `token`.
    fn post(&self, to: Endpoint, header: &[u8], body: Body, token: u64) -> Result<Posted>;

    /// `ucp_worker_progress`: handles pending work without waiting. Returns how much that was.
    fn progress(&self) -> Result<usize>;

    /// `ucp_worker_get_efd`: becomes readable when there is something to progress, once [`arm`](Self::arm) has been true.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// `ucp_worker_arm`: whether a thread may now sleep on the descriptor. If not, call `progress` first.
    ///
    /// Sleep only for short times, since not everything wakes a sleeper.
    fn arm(&self) -> Result<bool>;

    /// `ucp_worker_signal`: wakes a thread that sleeps on the descriptor.
    fn wake(&self) -> Result<()>;

    /// `ucp_ep_close_nbx` by force: pending messages soon end with a failure. Closing twice is no error.
    fn close(&self, endpoint: Endpoint) -> Result<()>;

    /// The number of messages being sent or received for which an event will still come.
    fn pending(&self) -> usize;

    /// Closes all endpoints, waits until nothing is pending, and frees everything. Fails if messages are still pending after
    /// `patience`; their memory is then leaked. Dropping the engine does the same with a patience of one second.
    fn shutdown(&self, patience: Duration) -> Result<()>;
}

/// The callbacks of an engine.
pub trait Events: Send + Sync {
    /// A message has arrived. The header is not authenticated.
    fn message(&self, header: &[u8], data: Data<'_>) -> Answer;

    /// A receive that [`Answer::Receive`] has started is over. If it failed, the contents of the buffer are unspecified.
    fn received(&self, token: u64, buffer: ReceiveBuffer, result: Result<()>);

    /// A pending message was sent, and its body is free. It may still be lost if the connection fails.
    fn sent(&self, token: u64, result: Result<()>);

    /// The endpoint's connection has failed.
    fn failed(&self, endpoint: Endpoint, why: Failure);
}

/// The body of a message that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    /// The bytes, which have arrived.
    Inline(&'a [u8]),
    /// The body has this many bytes, is still with the sender, and can be received.
    Rendezvous(usize),
}

impl Data<'_> {
    /// Bytes of the body.
    pub fn len(&self) -> usize {
        match self {
            Self::Inline(bytes) => bytes.len(),
            Self::Rendezvous(bytes) => *bytes,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the engine does with a message.
#[derive(Debug)]
pub enum Answer {
    /// Nothing more. A body that is still with the sender is not received, but the sender sees success.
    Done,
    /// Refuses it. A sender that still has the body gets a failure.
    Refuse,
    /// Receives the body into this buffer, wherever the body is now. [`Events::received`] follows.
    Receive {
        /// At least as large as the body.
        buffer: ReceiveBuffer,
        /// Passed to [`Events::received`].
        token: u64,
    },
}

/// Keeps memory alive.
type Owner = Arc<dyn Any + Send + Sync>;

/// The body of a message. It belongs to the engine until it was sent.
pub struct Body {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the bytes where they are.
    _owner: Option<Owner>,
}

// SAFETY: the bytes are only read, and the owner may be moved and shared.
unsafe impl Send for Body {}
// SAFETY: likewise.
unsafe impl Sync for Body {}

impl Body {
    /// None.
    pub const EMPTY: Self = Self { start: NonNull::dangling(), bytes: 0, _owner: None };

    /// Memory that `owner` keeps.
    ///
    /// # Safety
    ///
    /// The bytes can be read, by any thread, as long as `owner` lives. Whoever writes them meanwhile accepts that any
    /// mixture of old and new bytes is sent.
    pub unsafe fn in_memory(start: NonNull<u8>, bytes: usize, owner: Owner) -> Self {
        Self { start, bytes, _owner: Some(owner) }
    }

    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(super) fn start(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// A copy, for the fake engine.
    #[cfg(feature = "fake")]
    pub(super) fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.bytes];
        // SAFETY: so many bytes can be read, and the copy is nobody else's.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(self.start(), self.bytes) };
        copy
    }
}

impl From<Vec<u8>> for Body {
    fn from(bytes: Vec<u8>) -> Self {
        let owner = Arc::new(bytes);
        let start = NonNull::from(owner.as_slice()).cast();
        let bytes = owner.len();
        Self { start, bytes, _owner: Some(owner) }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Body of {} bytes", self.bytes)
    }
}

/// Memory that the engine receives a body into. It belongs to the engine until then.
pub struct ReceiveBuffer {
    start: NonNull<u8>,
    bytes: usize,
    keeper: Keeper,
}

enum Keeper {
    Bytes(Vec<u8>),
    /// Only kept.
    Owner(#[allow(dead_code, reason = "it is kept for its drop")] Owner),
}

// SAFETY: the buffer has its memory for itself, or its maker has vouched for it; the owner may be moved and shared.
unsafe impl Send for ReceiveBuffer {}
// SAFETY: nothing can be done to it by reference.
unsafe impl Sync for ReceiveBuffer {}

impl ReceiveBuffer {
    /// Memory of its own.
    pub fn new(bytes: usize) -> Self {
        let mut memory = vec![0; bytes];
        let start = NonNull::from(memory.as_mut_slice()).cast();
        Self { start, bytes, keeper: Keeper::Bytes(memory) }
    }

    /// Memory that `owner` keeps.
    ///
    /// # Safety
    ///
    /// The bytes can be written, by any thread, as long as `owner` lives, and nobody has a reference to them. Whoever
    /// reads or writes them meanwhile, through atomics or pointers, accepts any contents.
    pub unsafe fn in_memory(start: NonNull<u8>, bytes: usize, owner: Owner) -> Self {
        Self { start, bytes, keeper: Keeper::Owner(owner) }
    }

    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes, of a buffer that has its own.
    pub fn into_bytes(self) -> Option<Vec<u8>> {
        match self.keeper {
            Keeper::Bytes(bytes) => Some(bytes),
            Keeper::Owner(_) => None,
        }
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies what has come already; whether it fits.
    pub(super) fn take(&mut self, bytes: &[u8]) -> bool {
        if bytes.len() > self.bytes {
            return false;
        }
        // SAFETY: there is room, the bytes that have come lie elsewhere, and the buffer may be written.
        unsafe { self.start().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        true
    }
}

impl fmt::Debug for ReceiveBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiveBuffer of {} bytes", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_takes_what_fits() {
        let mut buffer = ReceiveBuffer::new(4);
        assert!(!buffer.take(b"large"));
        assert!(buffer.take(b"fit"));
        assert_eq!(buffer.into_bytes().unwrap(), b"fit\0");
    }

    #[test]
    fn memory_of_an_owner_stays_as_long_as_the_body_and_the_buffer() {
        let owner: Arc<Vec<u8>> = Arc::new(vec![7; 8]);
        let start = NonNull::from(owner.as_slice()).cast();
        // SAFETY: the owner keeps them.
        let body = unsafe { Body::in_memory(start, 8, owner.clone()) };
        // SAFETY: nobody writes there.
        let buffer = unsafe { ReceiveBuffer::in_memory(start, 8, owner.clone()) };
        assert_eq!((body.len(), buffer.len(), Arc::strong_count(&owner)), (8, 8, 3));
        assert!(buffer.into_bytes().is_none());
        drop(body);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
