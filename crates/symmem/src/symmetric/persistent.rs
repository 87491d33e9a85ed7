//! Allocations that outlive their users: the same id gives the same memory again.

use std::marker::PhantomData;
use std::sync::Arc;

use super::Buffer;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::group::Group;
use crate::memory::Backend;
use crate::memory::block::Block;
use crate::sync::Ordering;
use crate::sync::atomic::fence;

impl Group {
    /// Allocates `len` elements under an id of your choice. A later call with the same id returns the same memory, with
    /// its contents and its rendezvous. It has one user at a time, and is freed with the world.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc_persistent::<f32>(1, 10)?;
    /// x.local_mut()[0] = 5.0;
    /// drop(x);
    /// let x = world.alloc_persistent::<f32>(1, 10)?; // the same memory
    /// assert_eq!(x.local()[0], 5.0);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn alloc_persistent<T: Element>(&self, id: u64, len: usize) -> Result<Buffer<T>> {
        let backend = Arc::clone(self.backend());
        let block =
            self.persistent(id, len, &backend, T::DTYPE, || Ok(self.alloc::<T>(len)?.block))?;
        Ok(Buffer { block, len, elements: PhantomData })
    }

    /// The block of an id, made by `make` the first time.
    pub(crate) fn persistent(
        &self,
        id: u64,
        len: usize,
        backend: &Arc<dyn Backend>,
        dtype: DType,
        make: impl FnOnce() -> Result<Arc<Block>>,
    ) -> Result<Arc<Block>> {
        let mut table = self.context().persistent();
        if let Some(known) = table.get(&id) {
            self.check_known(id, len, backend, dtype, known)?;
            if !known.1.is_open() {
                return Ok(Arc::clone(&known.1));
            }
            // A peer may still read what a former user shared and never released: that memory stays as it is.
        }
        let block = make()?;
        table.insert(id, (dtype, Arc::clone(&block)));
        Ok(block)
    }

    /// Whether what an id has is free, and what is asked for.
    fn check_known(
        &self,
        id: u64,
        len: usize,
        backend: &Arc<dyn Backend>,
        asked: DType,
        (dtype, known): &(DType, Arc<Block>),
    ) -> Result<()> {
        const OP: &str = "alloc_persistent";
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
        let (bytes, had) = (len.saturating_mul(asked.size()), known.shape().bytes);
        if bytes != had {
            let expected = format!("the size of the previous allocation with id {id}, {had} bytes");
            return Err(self.usage(OP, expected, format!("{bytes} bytes")));
        }
        if *dtype != asked {
            let expected =
                format!("the element type of the previous allocation with id {id}, {dtype}");
            return Err(self.usage(OP, expected, asked.to_string()));
        }
        let (had, wanted) = (&known.segment().backend, backend);
        if (had.name(), had.device()) != (wanted.name(), wanted.device()) {
            let name = |b: &Arc<dyn Backend>| format!("{} on {}", b.name(), b.device());
            let expected =
                format!("the backend of the previous allocation with id {id}, {}", name(had));
            return Err(self.usage(OP, expected, name(wanted)));
        }
        Ok(())
    }
}
