//! Elements that others may touch meanwhile, as relaxed atomics: a load that races with a store gets the old element or the new
//! one. Elements of more than 8 bytes, and those of odd sizes, are several atomics each.
#![allow(unsafe_code)] // S2 (atomics of the same size for all), S3: callers hand over ranges that they may touch

use crate::dtype::{Element, Number};
use crate::memory::units::{load_units, store_units, unit};
use crate::sync::Ordering;
use crate::sync::shared::{AtomicI32, AtomicI64, AtomicU32, AtomicU64};

/// Stores all of `data`, from `to` on.
///
/// # Safety
/// There are as many elements, at a multiple of their size, and while this runs they are touched by these functions only.
pub(crate) unsafe fn store<T: Element>(data: &[T], to: *mut T) {
    let (unit, bytes) = (unit(size_of::<T>()), size_of_val(data));
    // SAFETY: as the caller promises; none of the elements' bits are undefined.
    unsafe { store_units(unit, data.as_ptr().cast(), to.cast(), bytes) };
}

/// Loads all of `out`, from `from` on.
///
/// # Safety
/// As for `store`.
pub(crate) unsafe fn load<T: Element>(from: *mut T, out: &mut [T]) {
    let (unit, bytes) = (unit(size_of::<T>()), size_of_val(out));
    // SAFETY: as the caller promises; every pattern of bits is a value of an element.
    unsafe { load_units(unit, from.cast(), out.as_mut_ptr().cast(), bytes) };
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

    /// Its bits, the highest of which are zero where it has fewer.
    #[doc(hidden)]
    fn bits(self) -> u64;

    /// The value of such bits.
    #[doc(hidden)]
    fn of_bits(bits: u64) -> Self;
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

            fn bits(self) -> u64 {
                let mut bits = [0; 8];
                bits[..size_of::<Self>()].copy_from_slice(&self.to_le_bytes());
                u64::from_le_bytes(bits)
            }

            fn of_bits(bits: u64) -> Self {
                bits as Self
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
