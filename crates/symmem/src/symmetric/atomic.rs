//! Elements that others may touch meanwhile, each as a relaxed atomic of its size: a load that meets a store gets the old
//! element or the new one.
#![allow(unsafe_code)] // S2 (atomics of the elements' size), S3: callers hand over ranges that they may touch

use crate::dtype::Element;
use crate::sync::Ordering;
use crate::sync::shared::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

macro_rules! by_size {
    ($($size:literal => $atomic:ty, $bits:ty;)*) => {
        /// Stores all of `data`, from `to` on.
        ///
        /// # Safety
        /// There are as many elements, aligned, and while this runs they are touched by atomics of their size only.
        pub(crate) unsafe fn store<T: Element>(data: &[T], to: *mut T) {
            match size_of::<T>() {
                $($size => for (i, value) in data.iter().enumerate() {
                    // SAFETY: an element has the size of these bits, and none of its bits are undefined.
                    let bits = unsafe { std::ptr::from_ref(value).cast::<$bits>().read_unaligned() };
                    // SAFETY: as the caller promises.
                    let word = unsafe { <$atomic>::from_ptr(to.cast::<$bits>().wrapping_add(i)) };
                    word.store(bits, Ordering::Relaxed);
                },)*
                _ => {} // no element has another size
            }
        }

        /// Loads all of `out`, from `from` on.
        ///
        /// # Safety
        /// As for `store`.
        pub(crate) unsafe fn load<T: Element>(from: *mut T, out: &mut [T]) {
            match size_of::<T>() {
                $($size => for (i, value) in out.iter_mut().enumerate() {
                    // SAFETY: as the caller promises.
                    let word = unsafe { <$atomic>::from_ptr(from.cast::<$bits>().wrapping_add(i)) };
                    let bits = word.load(Ordering::Relaxed);
                    // SAFETY: an element has the size of these bits, and every pattern of them is one.
                    unsafe { std::ptr::from_mut(value).cast::<$bits>().write_unaligned(bits) };
                },)*
                _ => {}
            }
        }
    };
}

by_size! {
    1 => AtomicU8, u8;
    2 => AtomicU16, u16;
    4 => AtomicU32, u32;
    8 => AtomicU64, u64;
}
