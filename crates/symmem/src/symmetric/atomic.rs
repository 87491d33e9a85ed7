//! Elements that others may touch meanwhile, as relaxed atomics: a load that races with a store gets the old element or the new
//! one. Elements of more than 8 bytes, and those of odd sizes, are several atomics each.
#![allow(unsafe_code)] // S2 (atomics of the same size for all), S3: callers hand over ranges that they may touch

use crate::dtype::{Element, Number};
use crate::sync::Ordering;
use crate::sync::shared::{AtomicI32, AtomicI64, AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Bytes of the atomics that elements of `size` bytes are touched by: elements lie at multiples of their size.
const fn unit(size: usize) -> usize {
    let largest = 1 << size.trailing_zeros();
    if largest > 8 { 8 } else { largest }
}

macro_rules! by_unit {
    ($($unit:literal => $atomic:ty, $bits:ty;)*) => {
        /// Stores all of `data`, from `to` on.
        ///
        /// # Safety
        /// There are as many elements, at a multiple of their size, and while this runs they are touched by these functions only.
        pub(crate) unsafe fn store<T: Element>(data: &[T], to: *mut T) {
            match unit(size_of::<T>()) {
                $($unit => for i in 0..size_of_val(data) / $unit {
                    // SAFETY: within `data`, none of whose bits are undefined.
                    let bits = unsafe { data.as_ptr().cast::<$bits>().add(i).read_unaligned() };
                    // SAFETY: as the caller promises.
                    let word = unsafe { <$atomic>::from_ptr(to.cast::<$bits>().wrapping_add(i)) };
                    word.store(bits, Ordering::Relaxed);
                },)*
                _ => {} // there are no others
            }
        }

        /// Loads all of `out`, from `from` on.
        ///
        /// # Safety
        /// As for `store`.
        pub(crate) unsafe fn load<T: Element>(from: *mut T, out: &mut [T]) {
            match unit(size_of::<T>()) {
                $($unit => for i in 0..size_of_val(out) / $unit {
                    // SAFETY: as the caller promises.
                    let word = unsafe { <$atomic>::from_ptr(from.cast::<$bits>().wrapping_add(i)) };
                    let bits = word.load(Ordering::Relaxed);
                    // SAFETY: within `out`, of which every pattern of bits is a value.
                    unsafe { out.as_mut_ptr().cast::<$bits>().add(i).write_unaligned(bits) };
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

/// Integers that can be changed and read in one step, in a peer's memory too: `u32`, `i32`, `u64`, `i64`.
pub trait Atomic: Number + private::Sealed {
    /// Adds, and returns what was there before.
    ///
    /// # Safety
    /// The element exists, at a multiple of its size, and while this runs it is touched by atomics of its size only.
    #[doc(hidden)]
    unsafe fn fetch_add(element: *mut Self, value: Self) -> Self;

    /// Replaces `expected`, and returns what was there before.
    ///
    /// # Safety
    /// As for `fetch_add`.
    #[doc(hidden)]
    unsafe fn compare_swap(element: *mut Self, expected: Self, new: Self) -> Self;
}

mod private {
    pub trait Sealed {}
}

macro_rules! atomics {
    ($($integer:ty => $atomic:ty;)*) => {$(
        impl private::Sealed for $integer {}

        impl Atomic for $integer {
            unsafe fn fetch_add(element: *mut Self, value: Self) -> Self {
                // SAFETY: as the caller promises. Each pairs with those of other ranks on the same element.
                unsafe { <$atomic>::from_ptr(element) }.fetch_add(value, Ordering::AcqRel)
            }

            unsafe fn compare_swap(element: *mut Self, expected: Self, new: Self) -> Self {
                // SAFETY: as above.
                let element = unsafe { <$atomic>::from_ptr(element) };
                let swapped =
                    element.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
                swapped.unwrap_or_else(|found| found)
            }
        }
    )*};
}

atomics! {
    u32 => AtomicU32;
    i32 => AtomicI32;
    u64 => AtomicU64;
    i64 => AtomicI64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_every_size_have_their_atomics() {
        assert_eq!([1, 2, 3, 4, 6, 8, 12, 16, 24].map(unit), [1, 2, 1, 4, 2, 8, 4, 8, 8]);
    }
}
