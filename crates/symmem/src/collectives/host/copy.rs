//! The copy loop: whole blocks from one rank's memory to another's, around the caches where that pays.
#![allow(unsafe_code)] // S2, S3: callers hand over ranges that they may touch, checked by them

/// Where the copy will be wanted next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Soon, by this core.
    Cached,
    /// Not before it would have left the caches anyway: writing around them saves reading the old contents first.
    Streaming,
}

/// Copies `bytes` that do not overlap.
///
/// # Safety
/// `from` may be read and `to` written for `bytes`, by nobody else meanwhile.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming && bytes >= 4096 && is_x86_feature_detected!("avx") {
        // SAFETY: as the caller promises, and the processor can.
        return unsafe { stream(from, to, bytes) };
    }
    let _ = stores;
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// # Safety
/// As `copy`; and the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const WIDTH: usize = 32;
    let head = to.align_offset(WIDTH).min(bytes);
    let whole = (bytes - head) / WIDTH * WIDTH;
    let tail = head + whole;
    // SAFETY: the first bytes, up to an aligned address.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    for at in (head..tail).step_by(WIDTH) {
        // SAFETY: within the range.
        let part = unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) };
        // SAFETY: within the range, and aligned.
        unsafe { _mm256_stream_si256(to.wrapping_add(at).cast(), part) };
    }
    // SAFETY: the last bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from.wrapping_add(tail), to.wrapping_add(tail), bytes - tail);
    }
    _mm_sfence(); // streaming stores are in no order with others; a barrier follows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_copy_exactly_what_they_are_told() {
        let from: Vec<u8> = (0..20_000_u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for stores in [Stores::Cached, Stores::Streaming] {
            for (offset, bytes) in [(0, 0), (1, 1), (3, 4095), (5, 4096), (31, 10_001), (0, 16_384)]
            {
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
