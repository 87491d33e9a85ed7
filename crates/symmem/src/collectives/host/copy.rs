//! The copy loop: whole blocks from one rank's memory to another's, around the caches where that pays.
#![allow(unsafe_code)] // S2, S3: callers hand over ranges that they may touch, checked by them

/// Where the copy will be wanted next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Soon, by this core.
    Cached,
    /// Soon, by another core, which has the old contents in its caches: whole lines are taken from there at once, without reading them.
    Passed,
    /// Not before it would have left the caches anyway: writing around them saves reading the old contents first.
    Streaming,
}

/// Bytes of the vectors that are stored around the caches, and their alignment.
pub(crate) const VECTOR: usize = 32;

/// Copies `bytes` that do not overlap.
///
/// # Safety
/// `from` may be read and `to` written for `bytes`, by nobody else meanwhile.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
    if bytes == size_of::<u64>() {
        // One number is the most usual tiny message, and a call would take longer. SAFETY: as the caller promises.
        let number = unsafe { from.cast::<u64>().read_unaligned() };
        // SAFETY: as the caller promises.
        return unsafe { to.cast::<u64>().write_unaligned(number) };
    }
    if stores != Stores::Cached {
        // SAFETY: as the caller promises.
        return unsafe { copy_large(from, to, bytes, stores) };
    }
    #[cfg(target_arch = "x86_64")]
    if SMALL.contains(&bytes) && is_x86_feature_detected!("avx512f") {
        // SAFETY: as the caller promises, and the processor can.
        return unsafe { copy_by_lines(from, to, bytes) };
    }
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// # Safety
/// As `copy`.
#[inline(never)] // small messages do not come here, and have no time for what it needs
unsafe fn copy_large(from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if stores == Stores::Passed && is_x86_feature_detected!("ermsb") {
        // SAFETY: as the caller promises.
        return unsafe { copy_as_string(from, to, bytes) };
    }
    #[cfg(target_arch = "x86_64")]
    if bytes >= 512 && is_x86_feature_detected!("avx") {
        // SAFETY: as the caller promises, and the processor can.
        return unsafe { copy_around(from, to, bytes) };
    }
    let _ = stores;
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// By the processor's own loop: it need not fetch lines that it writes as a whole, and has many of them under way. Its stores are done
/// before any that follow, so a flag needs no fence.
///
/// # Safety
/// As `copy`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_as_string(from: *const u8, to: *mut u8, bytes: usize) {
    // Some processors are many times slower where the destination is not aligned.
    let head = to.align_offset(64).min(bytes);
    // SAFETY: the first bytes, up to an aligned address.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    // SAFETY: the other bytes, as the caller promises; the direction is forward, as everywhere between functions.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes - head => _,
            inout("rdi") to.wrapping_add(head) => _,
            inout("rsi") from.wrapping_add(head) => _,
            options(nostack, preserves_flags)
        );
    }
}

/// What is copied with one store for each line: the lines are often a peer's, and a core has only so many stores under way.
#[cfg(target_arch = "x86_64")]
const SMALL: std::ops::RangeInclusive<usize> = 64..=4096;

/// # Safety
/// As `copy`; at least a line, and the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn copy_by_lines(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_storeu_si512};
    const LINE: usize = 64;
    let last = bytes - LINE; // may have some bytes of the line before it once more
    for at in (0..last).step_by(LINE).chain([last]) {
        // SAFETY: within the range.
        let line = unsafe { _mm512_loadu_si512(from.wrapping_add(at).cast()) };
        // SAFETY: within the range.
        unsafe { _mm512_storeu_si512(to.wrapping_add(at).cast(), line) };
    }
}

/// # Safety
/// As `copy`; and the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_around(from: *const u8, to: *mut u8, bytes: usize) {
    type Line = [u8; 64];
    let head = to.align_offset(VECTOR).min(bytes);
    let tail = head + (bytes - head) / size_of::<Line>() * size_of::<Line>();
    // SAFETY: the first bytes, up to an aligned address.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    for at in (head..tail).step_by(size_of::<Line>()) {
        // SAFETY: within the range.
        let line: Line = unsafe { from.wrapping_add(at).cast::<Line>().read() };
        // SAFETY: within the range, and aligned.
        unsafe { stream(&line, to.wrapping_add(at).cast()) };
    }
    // SAFETY: the last bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from.wrapping_add(tail), to.wrapping_add(tail), bytes - tail);
    }
    settle();
}

/// Stores `from` around the caches.
///
/// # Safety
/// `to` may be written, by nobody else meanwhile; it is aligned to vectors, and whole vectors; the processor has AVX.
#[inline(always)]
pub(crate) unsafe fn stream<T>(from: &T, to: *mut T) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..size_of::<T>()).step_by(VECTOR) {
        use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
        let from = std::ptr::from_ref(from).wrapping_byte_add(at).cast();
        // SAFETY: within `from`.
        let part = unsafe { _mm256_loadu_si256(from) };
        // SAFETY: as the caller promises.
        unsafe { _mm256_stream_si256(to.wrapping_byte_add(at).cast(), part) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, to);
}

/// Ends a run of stores around the caches: they are in no order with others, and a barrier follows.
#[inline(always)]
pub(crate) fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence touches nothing; every such processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ways_copy_exactly_what_they_are_told() {
        let from: Vec<u8> = (0..20_000_u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for stores in [Stores::Cached, Stores::Passed, Stores::Streaming] {
            for (offset, bytes) in [
                (0, 0),
                (1, 1),
                (9, 8),
                (2, 64),
                (7, 65),
                (3, 4095),
                (5, 4096),
                (31, 10_001),
                (0, 16_384),
            ] {
                let mut to = vec![0; 20_064];
                // SAFETY: both ranges are within their vectors.
                unsafe {
                    copy(
                        from.as_ptr().wrapping_add(offset),
                        to.as_mut_ptr().wrapping_add(offset + 7),
                        bytes,
                        stores,
                    );
                }
                let at = offset + 7;
                assert_eq!(&to[at..at + bytes], &from[offset..offset + bytes]);
                assert!(to[..at].iter().chain(&to[at + bytes..]).all(|b| *b == 0));
            }
        }
    }
}
