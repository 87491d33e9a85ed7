//! Active messages between processes, as a trait that the real and the fake engine implement.
//!
//! - A **message** is a header of at most [`MAX_HEADER`] bytes and a body of any size. Messages arrive whole and once, or not
//!   at all; in which order, nobody promises. Who has sent one is said by its header, if by anything.
//! - An **endpoint** leads to one peer. If its connection fails, [`Events::failed`] says so, all that is posted to it ends
//!   with a failure, and the engine closes it.
//! - **Nothing happens by itself.** Events come out of [`progress`](Engine::progress), and also out of `post`, `close` and
//!   `shutdown`, on the thread that has called it, one at a time. They note what they have learnt: calls of an engine from
//!   within an event are refused. A panic there ends the engine.
//!
//! Several threads may use an engine. One that comes while another progresses does not progress, but returns.
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

/// What an engine of this process is told when it is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Which transports to use, as `UCX_TLS` names them; else all but those for shared memory and for devices.
    pub transports: Option<String>,
    /// Which network devices to use, as `UCX_NET_DEVICES` names them, such as `eth0`; else all.
    pub devices: Option<String>,
    /// Whether to connect to peers with another version of UCX.
    pub mixed_versions: bool,
}

/// One way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint(pub(super) usize);

/// What has become of a message that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It is on its way and its body is free; no event tells more.
    Sent,
    /// [`Events::sent`] will be called.
    Pending,
}

/// Active messages of one process.
pub trait Engine: fmt::Debug + Send + Sync {
    /// The library's version.
    fn version(&self) -> Version;

    /// By which peers [`connect`](Self::connect) to this engine; some 100 bytes.
    fn address(&self) -> &[u8];

    /// `ucp_ep_create`: a way to the engine with this address. That nobody answers there is found out later.
    ///
    /// What is no address, was damaged, or is from another version of UCX is refused.
    fn connect(&self, address: &[u8]) -> Result<Endpoint>;

    /// `ucp_am_send_nbx`: posts a message. It never waits.
    ///
    /// After [`Posted::Pending`], [`Events::sent`] gets `token`.
    fn post(&self, to: Endpoint, header: &[u8], body: Body, token: u64) -> Result<Posted>;

    /// `ucp_worker_progress`: does what is to be done; how much that was. It never waits.
    fn progress(&self) -> Result<usize>;

    /// `ucp_worker_get_efd`: becomes readable when there is something to progress, once [`arm`](Self::arm) has been true.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// `ucp_worker_arm`: whether one may sleep now; else there is something to progress first.
    ///
    /// Sleep for short times only: not all that happens wakes a sleeper.
    fn arm(&self) -> Result<bool>;

    /// `ucp_worker_signal`: wakes who sleeps on the descriptor.
    fn wake(&self) -> Result<()>;

    /// `ucp_ep_close_nbx` by force: what is pending there ends with a failure, soon. Closing twice is no error.
    fn close(&self, endpoint: Endpoint) -> Result<()>;

    /// Messages posted or being received whose end no event has told yet.
    fn pending(&self) -> usize;

    /// Closes all endpoints, waits until nothing is pending, and gives everything back. What is still pending when
    /// `patience` ends is a failure; its memory is then never given back. Dropping the engine does the same with a second.
    fn shutdown(&self, patience: Duration) -> Result<()>;
}

/// Whom an engine tells what happens.
pub trait Events: Send + Sync {
    /// A message has arrived. The header is what the sender says, and proves nothing.
    fn message(&self, header: &[u8], data: Data<'_>) -> Answer;

    /// What [`Answer::Receive`] has asked for is over. If it failed, the buffer has any contents.
    fn received(&self, token: u64, buffer: ReceiveBuffer, result: Result<()>);

    /// A message that was pending is sent, and its body is free. It may still get lost with the connection.
    fn sent(&self, token: u64, result: Result<()>);

    /// The endpoint's connection has failed.
    fn failed(&self, endpoint: Endpoint, why: Failure);
}

/// The body of a message that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    /// It is here.
    Inline(&'a [u8]),
    /// It is still with the sender, of this many bytes, and can be received.
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

/// What is to be done with a message.
#[derive(Debug)]
pub enum Answer {
    /// Nothing more. A body that is still with the sender is not received, and the sender is told that it was.
    Done,
    /// Nothing: it is not wanted. A sender that still has the body gets a failure.
    Refuse,
    /// The body goes to this buffer, wherever it is now, and [`Events::received`] tells when it is there.
    Receive {
        /// Of the body's size or larger.
        buffer: ReceiveBuffer,
        /// What [`Events::received`] gets.
        token: u64,
    },
}

/// What keeps memory there.
type Owner = Arc<dyn Any + Send + Sync>;

/// The body of a message to be sent, which belongs to the engine until it is.
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
