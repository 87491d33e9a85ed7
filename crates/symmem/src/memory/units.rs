//! Bytes that others may touch meanwhile, as relaxed atomics: a load that races with a store gets the old element or the new one.
//! Elements of more than 8 bytes, and those of odd sizes, are several atomics each.
#![allow(unsafe_code)] // S2 (atomics of the same size for all), S3: callers hand over ranges that they may touch

use crate::sync::Ordering;
use crate::sync::shared::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Bytes of the atomics that elements of `size` bytes are touched by: elements lie at multiples of their size.
pub(crate) const fn unit(size: usize) -> usize {
    let largest = 1 << size.trailing_zeros();
    if largest > 8 { 8 } else { largest }
}

macro_rules! by_unit {
    ($($unit:literal => $atomic:ty, $bits:ty;)*) => {
        /// Stores `bytes` of elements that are touched by atomics of `unit` bytes.
        ///
        /// # Safety
        /// `from` may be read and `to`, at a multiple of the unit, written for that many bytes, and while this runs `to` is
        /// touched by these functions only.
        #[inline]
        pub(crate) unsafe fn store_units(unit: usize, from: *const u8, to: *mut u8, bytes: usize) {
            // SAFETY: as the caller promises.
            let wide = unsafe { wide::store(from, to, bytes) };
            let (from, to, bytes) = (from.wrapping_add(wide), to.wrapping_add(wide), bytes - wide);
            match unit {
                $($unit => for i in 0..bytes / $unit {
                    // SAFETY: as the caller promises.
                    let bits = unsafe { from.cast::<$bits>().wrapping_add(i).read_unaligned() };
                    // SAFETY: as the caller promises.
                    let word = unsafe { <$atomic>::from_ptr(to.cast::<$bits>().wrapping_add(i)) };
                    word.store(bits, Ordering::Relaxed);
                },)*
                _ => {} // there are no others
            }
        }

        /// Loads them.
        ///
        /// # Safety
        /// As for `store_units`, the other way.
        #[inline]
        pub(crate) unsafe fn load_units(unit: usize, from: *mut u8, to: *mut u8, bytes: usize) {
            // SAFETY: as the caller promises.
            let wide = unsafe { wide::load(from, to, bytes) };
            let (from, to, bytes) = (from.wrapping_add(wide), to.wrapping_add(wide), bytes - wide);
            match unit {
                $($unit => for i in 0..bytes / $unit {
                    // SAFETY: as the caller promises.
                    let word = unsafe { <$atomic>::from_ptr(from.cast::<$bits>().wrapping_add(i)) };
                    let bits = word.load(Ordering::Relaxed);
                    // SAFETY: as the caller promises.
                    unsafe { to.cast::<$bits>().wrapping_add(i).write_unaligned(bits) };
                },)*
                _ => {}
            }
        }
    };
}

by_unit! {
    1 => AtomicU8, u8;
    2 => AtomicU16, u16;
    4 => AtomicU32, u32;
    8 => AtomicU64, u64;
}

/// The same by vectors. Processors with AVX load and store 16 aligned bytes at once, so no element is torn; the compiler has no such
/// atomics, but knows nothing of what happens in assembly.
#[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
mod wide {
    use std::arch::asm;

    /// From so many bytes on, vectors are worth looking for.
    const FROM: usize = 256;
    /// Bytes of one round.
    const ROUND: usize = 64;

    /// How many bytes are done in whole rounds: none unless the shared side is aligned to vectors.
    #[inline]
    fn rounds(shared: usize, bytes: usize) -> usize {
        let fits = bytes >= FROM && shared.is_multiple_of(16);
        if fits && is_x86_feature_detected!("avx") { bytes / ROUND * ROUND } else { 0 }
    }

    macro_rules! by_vectors {
        (
            $(#[$doc:meta])*
            $name:ident($from:ident, $to:ident), $shared:ident, $load:literal, $store:literal
        ) => {
            $(#[$doc])*
            #[inline]
            pub(super) unsafe fn $name($from: *const u8, $to: *mut u8, bytes: usize) -> usize {
                let done = rounds($shared.addr(), bytes);
                if done > 0 {
                    // SAFETY: whole rounds within both, the shared side aligned; the processor has AVX.
                    unsafe {
                        asm!(
                            "2:",
                            concat!($load, " {a}, [{from} + {at}]"),
                            concat!($load, " {b}, [{from} + {at} + 16]"),
                            concat!($load, " {c}, [{from} + {at} + 32]"),
                            concat!($load, " {d}, [{from} + {at} + 48]"),
                            concat!($store, " [{to} + {at}], {a}"),
                            concat!($store, " [{to} + {at} + 16], {b}"),
                            concat!($store, " [{to} + {at} + 32], {c}"),
                            concat!($store, " [{to} + {at} + 48], {d}"),
                            "add {at}, 64",
                            "jnz 2b",
                            from = in(reg) $from.wrapping_add(done),
                            to = in(reg) $to.wrapping_add(done),
                            at = inout(reg) done.wrapping_neg() => _,
                            a = out(xmm_reg) _,
                            b = out(xmm_reg) _,
                            c = out(xmm_reg) _,
                            d = out(xmm_reg) _,
                            options(nostack),
                        );
                    }
                }
                done
            }
        };
    }

    by_vectors! {
        /// Stores the first of `bytes`; how many.
        ///
        /// # Safety
        /// `from` may be read and `to` written for that many bytes.
        store(from, to), to, "vmovdqu", "vmovdqa"
    }

    by_vectors! {
        /// Loads the first of `bytes`; how many.
        ///
        /// # Safety
        /// As for `store`, the other way.
        load(from, to), from, "vmovdqa", "vmovdqu"
    }
}

/// Nothing by vectors.
#[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
mod wide {
    pub(super) unsafe fn store(_: *const u8, _: *mut u8, _: usize) -> usize {
        0
    }

    pub(super) unsafe fn load(_: *const u8, _: *mut u8, _: usize) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_comes_whatever_the_unit_the_length_and_the_alignment() {
        let from: Vec<u8> = (0..3000_u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for (unit, offset, len) in [1, 2, 4, 8]
            .into_iter()
            .flat_map(|unit| [0, 1, 2, 3].map(|shift| (unit, shift * unit)))
            .flat_map(|(unit, at)| [0, 8, 248, 256, 264, 1000, 2048].map(|len| (unit, at, len)))
        {
            let mut words = vec![0_u64; 400];
            let shared = words.as_mut_ptr().cast::<u8>().wrapping_add(16 + offset);
            let mut back = vec![0; len];
            // SAFETY: within the vectors, at a multiple of the unit; nobody else has them.
            unsafe { store_units(unit, from.as_ptr().wrapping_add(3), shared, len) };
            // SAFETY: as above.
            unsafe { load_units(unit, shared, back.as_mut_ptr(), len) };
            assert_eq!(back, from[3..3 + len], "{len} bytes by {unit} from {offset}");
            let all: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let others = all[..16 + offset].iter().chain(&all[16 + offset + len..]);
            assert!(others.copied().all(|byte| byte == 0), "{len} bytes by {unit} from {offset}");
        }
    }

    #[test]
    fn elements_of_every_size_have_their_atomics() {
        assert_eq!([1, 2, 3, 4, 6, 8, 12, 16, 24].map(unit), [1, 2, 1, 4, 2, 8, 4, 8, 8]);
    }
}
