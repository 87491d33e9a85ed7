//! What streams do.
#![allow(unsafe_code)] // S1, S2, S3

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use super::devices::device_of;
use super::state::{Kernel, State};
use super::{Fake, Launched, PATIENCE};
use crate::cuda::driver::refuse;
use crate::cuda::{Compare, Context, Result, Stream, code};

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
    Write {
        address: u64,
        value: u64,
        wide: bool,
    },
    Wait {
        address: u64,
        value: u64,
        wide: bool,
        compare: Compare,
    },
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
        let context = stream_context(call, &state, stream)?;
        let capture = state.streams.get_mut(&stream.raw()).and_then(|found| found.capture.as_mut());
        if let Some(capture) = capture {
            if capture.invalidated {
                return refuse(call, code::STREAM_CAPTURE_INVALIDATED, "a call has ended it");
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
                return refuse(
                    call,
                    code::ILLEGAL_ADDRESS,
                    "nothing is mapped there, or no access",
                );
            }
            match work {
                // SAFETY: it was just found mapped and accessible; the caller vouches for the rest.
                Work::Set { address, pattern, count } => unsafe { set(*address, pattern, *count) },
                // SAFETY: as above, and the caller vouches for the host's memory.
                Work::Copy { to, from, bytes } => unsafe { copy(*to, *from, *bytes) },
                Work::Write { address, value, wide } => {
                    check_aligned(call, *address, *wide)?;
                    // SAFETY: as above.
                    unsafe { store(*address, *value, *wide) };
                }
                Work::Wait { address, value, wide, compare } => {
                    check_aligned(call, *address, *wide)?;
                    // SAFETY: as above.
                    unsafe { wait(call, *address, *value, *wide, *compare) }?;
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

/// The context of a stream; that of the default stream is the current one.
pub(super) fn stream_context(call: &'static str, state: &State, stream: Stream) -> Result<Context> {
    if stream == Stream::DEFAULT {
        return state.current(call);
    }
    match state.streams.get(&stream.raw()) {
        Some(found) => Ok(found.context),
        None => refuse(call, code::INVALID_HANDLE, format!("{stream:?} is no stream")),
    }
}

/// Whether everything that `work` touches is mapped and accessible.
fn may(state: &State, context: Context, work: &Work) -> bool {
    let reach =
        |address, bytes, write| state.reachable(address, bytes, device_of(context).0, write);
    let width = |wide: &bool| if *wide { 8 } else { 4 };
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
        Work::Write { address, wide, .. } => reach(*address, width(wide), true),
        Work::Wait { address, wide, .. } => reach(*address, width(wide), false),
        Work::Launch(..) | Work::Record(_) | Work::Nothing => true,
    }
}

fn check_aligned(call: &'static str, address: u64, wide: bool) -> Result<()> {
    if address.is_multiple_of(if wide { 8 } else { 4 }) {
        return Ok(());
    }
    refuse(call, code::INVALID_VALUE, "the word is not aligned")
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

/// # Safety
///
/// The word is mapped and aligned.
unsafe fn store(address: u64, value: u64, wide: bool) {
    let at = address as usize;
    if wide {
        // SAFETY: the caller vouches for the word.
        let word = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(at)) };
        // Pairs with the acquire in `wait`, and with whatever reads the word elsewhere.
        word.store(value, Ordering::Release);
    } else {
        // SAFETY: the caller vouches for the word.
        let word = unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(at)) };
        // Pairs with the acquire in `wait`, and with whatever reads the word elsewhere.
        word.store(value as u32, Ordering::Release);
    }
}

/// # Safety
///
/// The word is mapped and aligned, until it has the value or the patience ends.
unsafe fn wait(
    call: &'static str,
    address: u64,
    value: u64,
    wide: bool,
    compare: Compare,
) -> Result<()> {
    let (at, start) = (address as usize, Instant::now());
    loop {
        let word = if wide {
            // SAFETY: the caller vouches for the word.
            let word = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(at)) };
            // Pairs with the release in `store`, and with whatever writes the word elsewhere.
            word.load(Ordering::Acquire)
        } else {
            // SAFETY: the caller vouches for the word.
            let word = unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(at)) };
            // Pairs with the release in `store`, and with whatever writes the word elsewhere.
            word.load(Ordering::Acquire).into()
        };
        let reached = match compare {
            Compare::Equal => word == value,
            Compare::And => word & value != 0,
            Compare::GreaterOrEqual if wide => word.wrapping_sub(value).cast_signed() >= 0,
            Compare::GreaterOrEqual => (word as u32).wrapping_sub(value as u32).cast_signed() >= 0,
        };
        if reached {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            return refuse(call, code::LAUNCH_TIMEOUT, "the word did not come");
        }
        std::thread::yield_now();
    }
}
