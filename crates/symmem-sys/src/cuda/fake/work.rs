//! What streams do.
#![allow(unsafe_code)] // S1, S2, S3

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use super::devices::device_of;
use super::state::{Kernel, State};
use super::{Fake, Launched, PATIENCE};
use crate::cuda::{Compare, Context, Failure, MemOp, Result, Stream, code};

/// One end of a copy.
#[derive(Clone, Copy)]
pub(super) enum End {
    /// Where the stream's device must reach.
    Device(u64),
    /// Where the device of this context must reach.
    Peer(u64, Context),
    Host(u64),
}

impl End {
    const fn address(self) -> u64 {
        match self {
            Self::Device(address) | Self::Peer(address, _) | Self::Host(address) => address,
        }
    }
}

/// Something to do, now or when the graph it was noted in is launched.
#[derive(Clone)]
pub(super) enum Work {
    /// A pattern of one or four bytes, so many times.
    Set {
        address: u64,
        pattern: Vec<u8>,
        count: usize,
    },
    Copy {
        to: End,
        from: End,
        bytes: usize,
    },
    Word(MemOp),
    Launch(Launched, Option<Kernel>),
    Record(usize),
    Nothing,
}

impl Fake {
    /// Does `works` in `stream`, or notes them if it is being captured.
    ///
    /// # Safety
    ///
    /// The caller vouches for the memory that they touch, now and when they are launched.
    pub(super) unsafe fn submit(
        &self,
        call: &'static str,
        stream: Stream,
        works: Vec<Work>,
    ) -> Result<()> {
        let mut state = self.enter(call)?;
        let context = state.context_of(stream)?;
        let capture = state.streams.get_mut(&stream.raw()).and_then(|found| found.capture.as_mut());
        if let Some(capture) = capture {
            if capture.invalidated {
                return state.refuse(code::STREAM_CAPTURE_INVALIDATED, "a call has ended it");
            }
            capture.noted.extend(works);
            return Ok(());
        }
        drop(state);
        // SAFETY: the caller vouches for the memory.
        unsafe { self.perform(call, context, &works) }
    }

    /// Does `works` one after the other.
    ///
    /// # Safety
    ///
    /// The caller vouches for the memory that they touch.
    unsafe fn perform(&self, call: &'static str, context: Context, works: &[Work]) -> Result<()> {
        for work in works {
            if !may(&self.lock(), context, work) {
                let why = "nothing is mapped there, or no access";
                return Err(Failure::new(call, code::ILLEGAL_ADDRESS, why));
            }
            match work {
                // SAFETY: it was just found mapped and accessible; the caller vouches for the rest.
                Work::Set { address, pattern, count } => unsafe { set(*address, pattern, *count) },
                // SAFETY: as above, and the caller vouches for the host's memory.
                Work::Copy { to, from, bytes } => unsafe { copy(*to, *from, *bytes) },
                Work::Word(operation) => {
                    let (address, bytes) = word(*operation);
                    if !address.is_multiple_of(bytes as u64) {
                        let why = "the word is not aligned";
                        return Err(Failure::new(call, code::INVALID_VALUE, why));
                    }
                    // SAFETY: as above, and it is aligned.
                    unsafe { operate(call, *operation) }?;
                }
                Work::Launch(launched, kernel) => {
                    self.lock().launches.push(launched.clone());
                    if let Some(kernel) = kernel {
                        (kernel.run)(launched);
                    }
                }
                Work::Record(event) => {
                    if let Some(event) = self.lock().events.get_mut(event) {
                        event.recorded = Some(Instant::now());
                    }
                }
                Work::Nothing => {}
            }
        }
        Ok(())
    }
}

/// Where the word of an operation is, and how many bytes it has.
const fn word(operation: MemOp) -> (u64, usize) {
    match operation {
        MemOp::Write32 { address, .. } | MemOp::Wait32 { address, .. } => (address, 4),
        MemOp::Write64 { address, .. } | MemOp::Wait64 { address, .. } => (address, 8),
    }
}

/// Whether everything that `work` touches is mapped and accessible.
fn may(state: &State, context: Context, work: &Work) -> bool {
    let reach =
        |address, bytes, write| state.reachable(address, bytes, device_of(context).0, write);
    match work {
        Work::Set { address, pattern, count } => reach(*address, pattern.len() * count, true),
        Work::Copy { to, from, bytes } => {
            let end = |end: End, write| match end {
                End::Device(address) => reach(address, *bytes, write),
                End::Peer(address, context) => {
                    state.reachable(address, *bytes, device_of(context).0, write)
                }
                End::Host(_) => true,
            };
            end(*to, true) && end(*from, false)
        }
        Work::Word(operation) => {
            let (address, bytes) = word(*operation);
            let writes = matches!(operation, MemOp::Write32 { .. } | MemOp::Write64 { .. });
            reach(address, bytes, writes)
        }
        Work::Launch(..) | Work::Record(_) | Work::Nothing => true,
    }
}

/// # Safety
///
/// The memory may be written.
unsafe fn set(address: u64, pattern: &[u8], count: usize) {
    let mut at = with_exposed_provenance_mut::<u8>(address as usize);
    if let [byte] = pattern {
        // SAFETY: the memory that the caller vouches for.
        unsafe { at.write_bytes(*byte, count) };
        return;
    }
    for _ in 0..count {
        // SAFETY: within the memory that the caller vouches for.
        unsafe { at.copy_from(pattern.as_ptr(), pattern.len()) };
        at = at.wrapping_add(pattern.len());
    }
}

/// # Safety
///
/// The one end may be read and the other be written.
unsafe fn copy(to: End, from: End, bytes: usize) {
    let source = with_exposed_provenance::<u8>(from.address() as usize);
    let target = with_exposed_provenance_mut::<u8>(to.address() as usize);
    // SAFETY: the caller vouches for both.
    unsafe { target.copy_from(source, bytes) };
}

/// Stores a word, or waits for it.
///
/// # Safety
///
/// The word is mapped and aligned, until it is stored, or has the value, or the patience ends.
unsafe fn operate(call: &'static str, operation: MemOp) -> Result<()> {
    let (address, bytes) = word(operation);
    let at = address as usize;
    // SAFETY: the caller vouches for the word; this is called only for one of four bytes.
    let narrow = || unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(at)) };
    // SAFETY: the caller vouches for the word; this is called only for one of eight bytes.
    let wide = || unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(at)) };
    let (value, compare) = match operation {
        // Pairs with the acquire below, and with whatever reads the word elsewhere.
        MemOp::Write32 { value, .. } => {
            narrow().store(value, Ordering::Release);
            return Ok(());
        }
        // Likewise.
        MemOp::Write64 { value, .. } => {
            wide().store(value, Ordering::Release);
            return Ok(());
        }
        MemOp::Wait32 { value, compare, .. } => (value.into(), compare),
        MemOp::Wait64 { value, compare, .. } => (value, compare),
    };
    let start = Instant::now();
    loop {
        // Pairs with the release above, and with whatever writes the word elsewhere.
        let word = match bytes {
            4 => narrow().load(Ordering::Acquire).into(),
            _ => wide().load(Ordering::Acquire),
        };
        let reached = match compare {
            Compare::Equal => word == value,
            Compare::And => word & value != 0,
            Compare::GreaterOrEqual if bytes == 8 => word.wrapping_sub(value).cast_signed() >= 0,
            Compare::GreaterOrEqual => (word as u32).wrapping_sub(value as u32).cast_signed() >= 0,
        };
        if reached {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            return Err(Failure::new(call, code::LAUNCH_TIMEOUT, "the word did not come"));
        }
        std::thread::yield_now();
    }
}
