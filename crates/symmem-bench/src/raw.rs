//! Writing and reading symmetric memory through pointers, as a user's own protocol does: eight bytes, and the bare data
//! movement of the collectives; the fence that the clock needs; what on a device takes a promise; and what ranks of several
//! hosts share on this machine.
#![allow(unsafe_code)] // S1 (the memory is borrowed with the pointers), S2 (volatile access, ordered by signals), S4

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use anyhow::{Result, ensure};
use symmem::{Symmetric, cuda};
use symmem_sys::cuda as sys;

use super::value::{Lane, Value};

/// What follows does not begin before what precedes has ended.
pub(super) fn load_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, which touches no memory.
    unsafe {
        core::arch::x86_64::_mm_lfence();
    }
}

/// Memory of so many bytes, all zero, that other processes can map by its descriptor.
pub(super) fn shareable(bytes: u64) -> rustix::io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("symmem-bench", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    Ok(memory)
}

/// The words at the beginning of such memory, as many bytes of them, and those after them; mapped for as long as the process lives.
pub(super) fn map_shared(
    file: &File,
    first: usize,
) -> Result<(&'static [AtomicU32], &'static [AtomicU64])> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let len = usize::try_from(file.metadata()?.len())?;
    ensure!(first <= len && first.is_multiple_of(size_of::<u64>()), "the memory is too small");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
    let (low, high) = (base.cast(), base.wrapping_byte_add(first).cast());
    let (low_len, high_len) = (first / size_of::<u32>(), (len - first) / size_of::<u64>());
    // SAFETY: within the mapping, aligned, and never unmapped; all processes touch it by atomics alone.
    let low = unsafe { std::slice::from_raw_parts(low, low_len) };
    // SAFETY: as above, and apart from the other.
    let high = unsafe { std::slice::from_raw_parts(high, high_len) };
    Ok((low, high))
}

/// Moves the calling thread into a network namespace of its own.
pub(super) fn leave_network() -> rustix::io::Result<()> {
    // SAFETY: descriptors stay shared with the other threads.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
}

/// Has the calling process find the network devices of its own network namespace in /sys, where libraries look for them.
pub(super) fn show_own_devices() -> rustix::io::Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    // SAFETY: descriptors stay shared with the other threads.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)
}

/// The first word of each rank's part. What is written is for the rank that is signalled afterwards.
pub(super) struct Words<'a> {
    memory: &'a Symmetric<u64>,
    peer: *mut u64,
    own: *const u64,
}

impl<'a> Words<'a> {
    /// Of this rank and of `peer`.
    pub(super) fn new(memory: &'a Symmetric<u64>, peer: usize) -> Result<Self> {
        ensure!(!memory.is_empty(), "there is no first word");
        let own = memory.peer_ptr(memory.group().rank())?;
        Ok(Self { memory, peer: memory.peer_ptr(peer)?, own })
    }

    /// Writes into the peer's part.
    pub(super) fn write(&self, value: u64) {
        debug_assert!(!self.memory.is_empty());
        // SAFETY: S1: `memory` is borrowed and has a first element; S2: volatile, and nobody holds a reference to it.
        unsafe { self.peer.write_volatile(value) }
    }

    /// Reads from our own part.
    pub(super) fn read(&self) -> u64 {
        // SAFETY: as in `write`.
        unsafe { self.own.read_volatile() }
    }
}

/// All ranks' parts of some memory, for the floor's own reading and writing between flags.
pub(super) struct Parts<'a, T: Value>(&'a Symmetric<T>);

impl<'a, T: Value> Parts<'a, T> {
    pub(super) fn new(memory: &'a Symmetric<T>) -> Self {
        Self(memory)
    }

    /// Copies elements `from` of rank `rank`'s part to `to`. Nobody writes them before the next exchange of flags.
    pub(super) fn copy(&self, rank: usize, from: Range<usize>, to: &mut [T]) -> Result<()> {
        ensure!(from.end <= self.0.len() && to.len() == from.len(), "the ranges do not fit");
        let part = self.0.peer_ptr(rank)?.wrapping_add(from.start);
        // SAFETY: S1: the memory is borrowed; the ranges were compared above; S2: flags part reading from writing.
        unsafe { std::ptr::copy_nonoverlapping(part, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies all of rank `root`'s part into ours, as [`Parts::copy`].
    pub(super) fn copy_all(&self, root: usize) -> Result<()> {
        let rank = self.0.group().rank();
        ensure!(rank != root, "the root has it");
        let (from, to) = (self.0.peer_ptr(root)?, self.0.peer_ptr(rank)?);
        // SAFETY: as in `copy`; two parts, both as long as the memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.0.len()) };
        Ok(())
    }

    /// Adds up `range` of all parts into `out`, or without it into the same range of all parts, which is ours alone.
    pub(super) fn add(&self, range: Range<usize>, out: Option<&mut [T]>) -> Result<()> {
        const { assert!(size_of::<T>() == size_of::<T::Lane>()) }
        let fits = out.as_ref().is_none_or(|out| out.len() == range.len());
        ensure!(range.end <= self.0.len() && fits, "the ranges do not fit");
        let part = |rank| -> Result<*mut T::Lane> {
            Ok(self.0.peer_ptr(rank)?.wrapping_add(range.start).cast())
        };
        let (out, ranks) = (out.map(|out| out.as_mut_ptr().cast()), self.0.group().size());
        if ranks == 2 {
            let from = [part(0)?, part(1)?];
            // SAFETY: S1, S2 as in `copy`; all are as long as `range`, and a lane is as large as an element.
            out.map_or_else(
                || unsafe { add(from, from, range.len()) },
                |out| {
                    // SAFETY: as above.
                    unsafe { add(from, [out], range.len()) }
                },
            );
            return Ok(());
        }
        let from = (0..ranks).map(part).collect::<Result<Vec<_>>>()?;
        let to = out.map_or_else(|| from.clone(), |out| vec![out]);
        // SAFETY: as above.
        unsafe { add(&*from, &*to, range.len()) };
        Ok(())
    }
}

/// Some pointers: an array where their number is known, so that the loops over them are unrolled.
trait Pointers<L>: AsRef<[*mut L]> {}
impl<L, const N: usize> Pointers<L> for [*mut L; N] {}
impl<L> Pointers<L> for &[*mut L] {}

/// Stores the sums of all `from` in all `to`, by the widest vectors there are.
///
/// # Safety
/// All are valid for `len` elements, and equal or apart.
unsafe fn add<L: Lane>(from: impl Pointers<L>, to: impl Pointers<L>, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bw") {
        // SAFETY: the processor has it; the rest is the caller's promise.
        return unsafe { add_avx512(from, to, len) };
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: as above.
        return unsafe { add_avx2(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { add_lines(from, to, len) }
}

/// # Safety
/// As [`add`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn add_avx512<L: Lane>(from: impl Pointers<L>, to: impl Pointers<L>, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { add_lines(from, to, len) }
}

/// # Safety
/// As [`add`], with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_avx2<L: Lane>(from: impl Pointers<L>, to: impl Pointers<L>, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { add_lines(from, to, len) }
}

/// # Safety
/// As [`add`].
#[inline(always)]
unsafe fn add_lines<L: Lane>(from: impl Pointers<L>, to: impl Pointers<L>, len: usize) {
    const LINE: usize = 16;
    let [first, rest @ ..] = from.as_ref() else { return };
    let line = |part: &*mut L, at| part.wrapping_add(at).cast::<[L; LINE]>();
    for at in (0..len / LINE).map(|index| index * LINE) {
        // SAFETY: 16 elements from `at` on are below `len`; unaligned, as the caller's block may be.
        let mut sum = unsafe { line(first, at).read_unaligned() };
        for part in rest {
            prefetch(part.wrapping_add(at + 16 * LINE));
            // SAFETY: as above.
            let more = unsafe { line(part, at).read_unaligned() };
            for (sum, more) in sum.iter_mut().zip(more) {
                *sum = sum.plus(more);
            }
        }
        for part in to.as_ref() {
            // SAFETY: as above.
            unsafe { line(part, at).write_unaligned(sum) };
        }
    }
    for at in len / LINE * LINE..len {
        // SAFETY: `at` is below `len`.
        let one = |part: &*mut L| unsafe { part.wrapping_add(at).read() };
        let sum = rest.iter().fold(one(first), |sum, part| sum.plus(one(part)));
        for part in to.as_ref() {
            // SAFETY: as above.
            unsafe { part.wrapping_add(at).write(sum) };
        }
    }
}

/// Has the processor fetch a line that is read soon. It may lie anywhere.
#[inline(always)]
fn prefetch<L>(_at: *const L) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does nothing for an address that is not mapped.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(_at.cast());
    }
}

/// Reads something in every line, and nothing else: the least that the user of a result does.
pub(super) fn read_lines<T: Copy>(slice: &[T]) {
    let line = (64 / size_of::<T>()).max(1);
    for element in slice.iter().step_by(line) {
        // SAFETY: a reference is valid to read through; volatile, so that the reading is not left out.
        unsafe { std::ptr::from_ref(element).read_volatile() };
    }
}

/// A device and the one stream in which this process has everything done there.
pub(super) struct Device {
    pub(super) gpu: cuda::Gpu,
    pub(super) stream: cuda::Stream,
    driver: Arc<dyn sys::Driver>,
    raw: sys::Stream,
}

impl Device {
    /// Makes its context the one of this thread, which does all the work.
    pub(super) fn open(number: u32) -> Result<Self> {
        let gpu = cuda::Gpu::open(number)?;
        let driver = sys::load()?;
        let context = driver.context_retain(driver.device(number as usize)?)?;
        driver.context_set(Some(context))?;
        let raw = driver.stream_create()?;
        // SAFETY: S4: made in the device's primary context, and never destroyed.
        let stream = unsafe { cuda::Stream::from_raw(&gpu, raw.raw()) };
        Ok(Self { gpu, stream, driver, raw })
    }

    /// Replays what was captured.
    pub(super) fn launch<M>(&self, graph: &cuda::Graph, _memory: &M) -> Result<()> {
        // SAFETY: S1: what it touches is borrowed, and the borrower waits for the end; all ranks do the same.
        Ok(unsafe { graph.launch(&self.stream) }?)
    }

    /// Copies the first `bytes` of this rank's part to the next as many, in the stream, whose end the caller awaits.
    pub(super) fn copy(&self, memory: &cuda::Symmetric<u8>, bytes: usize) -> symmem::Result<()> {
        let failed = |why: String| symmem::Error::unavailable("a copy", why);
        let parts = memory.handle().buffer_ptrs();
        let own = parts.get(memory.group().rank()).filter(|_| 2 * bytes <= memory.len());
        let own = *own.ok_or_else(|| failed("it does not fit".to_owned()))? as u64;
        // SAFETY: S1, S3: both halves are within our own part, which nobody else touches.
        let copied = unsafe { self.driver.copy(own + bytes as u64, own, bytes, self.raw) };
        copied.map_err(|failure| failed(failure.to_string()))
    }
}
