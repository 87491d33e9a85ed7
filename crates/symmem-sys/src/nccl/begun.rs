//! Handles that the library writes when it gets there.
#![allow(unsafe_code)] // S4

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Result;
use super::types::Handle;

/// Something that the library is making: where it writes the handle, by a thread of its own or at the end of a group.
///
/// The call has answered, but that is not the end of it unless the communicator blocks and no group is open:
/// [`Nccl::async_error`](super::Nccl::async_error) of the communicator tells. Dropped before its [`end`](Self::end), its few
/// bytes stay, for the library may still write there.
pub struct Begun<T: Handle> {
    cell: ManuallyDrop<Box<AtomicUsize>>,
    kind: PhantomData<T>,
}

impl<T: Handle> Begun<T> {
    /// What `call` begins, given where the library is to write; unless it has failed, for then the library writes no more.
    pub(super) fn by(call: impl FnOnce(*mut usize) -> Result<()>) -> Result<Self> {
        let begun = Self { cell: ManuallyDrop::new(Box::default()), kind: PhantomData };
        match call(begun.cell.as_ptr()) {
            Err(failure) if !failure.is_in_progress() => Err(failure),
            _ => Ok(begun),
        }
    }

    /// What the library has written so far. A communicator that is not ready can only be asked and aborted.
    pub fn peek(&self) -> Option<T> {
        // Pairs with the library's release store, after everything the handle leads to.
        T::given(self.cell.load(Ordering::Acquire))
    }

    /// What was made; nothing where the library has found that nothing is needed.
    ///
    /// # Safety
    ///
    /// The call is over, by itself or because it has failed: the library will not write again.
    pub unsafe fn end(mut self) -> Option<T> {
        let made = self.peek();
        // SAFETY: nobody writes there any more, and `self` is gone after this.
        unsafe { ManuallyDrop::drop(&mut self.cell) };
        made
    }
}

impl<T: Handle> fmt::Debug for Begun<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Begun").field(&self.cell).finish()
    }
}
