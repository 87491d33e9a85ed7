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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_every_size_have_their_atomics() {
        assert_eq!([1, 2, 3, 4, 6, 8, 12, 16, 24].map(unit), [1, 2, 1, 4, 2, 8, 4, 8, 8]);
    }
}
