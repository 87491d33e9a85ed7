//! Allocations that outlive their users: the same id gives the same memory again.

use std::marker::PhantomData;
use std::sync::Arc;

use super::Buffer;
use crate::dtype::Element;
use crate::error::Result;
use crate::group::Group;
use crate::sync::Ordering;
use crate::sync::atomic::fence;

impl Group {
    /// Allocates `len` elements under an id of the caller's choice; a later call with the same id gets the same memory,
    /// with what it held, and the rendezvous it had. One user at a time; freed with the world.
    pub fn alloc_persistent<T: Element>(&self, id: u64, len: usize) -> Result<Buffer<T>> {
        const OP: &str = "alloc_persistent";
        let mut table = self.context().persistent();
        let Some((dtype, known)) = table.get(&id) else {
            let buffer = self.alloc::<T>(len)?;
            table.insert(id, (T::DTYPE, Arc::clone(&buffer.block)));
            return Ok(buffer);
        };
        let users = Arc::strong_count(known) - 1;
        fence(Ordering::Acquire); // pairs with the release by which the last user let go
        if users > 0 {
            let expected = format!("id {id} not in use");
            return Err(self.usage(
                OP,
                expected,
                "a previous allocation with it is still active".into(),
            ));
        }
        let (bytes, had) = (len.saturating_mul(size_of::<T>()), known.shape().bytes);
        if bytes != had {
            let expected = format!("the size of the previous allocation with id {id}, {had} bytes");
            return Err(self.usage(OP, expected, format!("{bytes} bytes")));
        }
        if *dtype != T::DTYPE {
            let expected =
                format!("the element type of the previous allocation with id {id}, {dtype}");
            return Err(self.usage(OP, expected, T::DTYPE.to_string()));
        }
        let backend = known.segment().backend.name();
        if backend != self.backend().name() {
            let expected =
                format!("the backend of the previous allocation with id {id}, {backend}");
            return Err(self.usage(OP, expected, self.backend().name().into()));
        }
        if known.is_open() {
            // A peer may still read what a former user shared and never released: that memory stays as it is.
            table.remove(&id);
            drop(table);
            return self.alloc_persistent(id, len);
        }
        Ok(Buffer { block: Arc::clone(known), len, elements: PhantomData })
    }
}
