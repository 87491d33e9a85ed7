//! All ranks' memory of one rendezvous, on the host or on a device.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use symmem::{DType, Element, cuda};

use crate::collectives::device_part;
use crate::lock::unlocked;

/// How many parts of a device's memory are kept.
const KEPT: usize = 64;

type Parts = HashMap<(DType, usize, usize), Box<dyn Any + Send + Sync>>;

pub(crate) struct Mapped {
    kind: Kind,
    /// The addresses of all ranks' memory and signal pads, by rank.
    pub(crate) buffers: Vec<usize>,
    pub(crate) pads: Vec<usize>,
    /// The same in device memory, once requested.
    table: OnceLock<cuda::Buffer<u64>>,
    /// Parts of a device's memory that were used, by type, offset and count. They cache state between calls.
    parts: Mutex<Parts>,
}

enum Kind {
    Host(symmem::Handle),
    Cuda(Box<cuda::Symmetric<u8>>),
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Kernels that use the table may be in streams that are unknown here.
        if let Some(table) = self.table.take() {
            unlocked(|| drop(table.gpu().settle())); // a device that has failed runs nothing
        }
    }
}

impl Mapped {
    pub(crate) fn host(handle: symmem::Handle) -> Self {
        let (buffers, pads) = (handle.buffer_ptrs(), handle.signal_pad_ptrs());
        Self::new(Kind::Host(handle), buffers, pads)
    }

    pub(crate) fn device(memory: cuda::Symmetric<u8>) -> Self {
        let (buffers, pads) = (memory.handle().buffer_ptrs(), memory.handle().signal_pad_ptrs());
        Self::new(Kind::Cuda(Box::new(memory)), buffers, pads)
    }

    fn new(kind: Kind, buffers: Vec<usize>, pads: Vec<usize>) -> Self {
        Self { kind, buffers, pads, table: OnceLock::new(), parts: Mutex::default() }
    }

    /// Does `work` on a part of a device's memory, using the cached one if there is one.
    pub(crate) fn with_part<T: Element>(
        &self,
        memory: &cuda::Symmetric<u8>,
        (offset, count): (usize, usize),
        work: impl FnOnce(&mut cuda::Symmetric<T>) -> symmem::Result<()>,
    ) -> symmem::Result<()> {
        let key = (T::DTYPE, offset, count);
        let known = self.parts().remove(&key).and_then(|part| part.downcast().ok());
        let mut part: Box<cuda::Symmetric<T>> = match known {
            Some(part) => part,
            None => Box::new(device_part(memory, offset, count)?),
        };
        let done = work(&mut part);
        let mut parts = self.parts();
        if parts.len() >= KEPT {
            parts.clear();
        }
        parts.insert(key, part);
        done
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        // Nothing is done under the lock that could leave the table half changed.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn handle(&self) -> &symmem::Handle {
        match &self.kind {
            Kind::Host(handle) => handle,
            Kind::Cuda(memory) => memory.handle(),
        }
    }

    /// The memory, if it is a device's.
    pub(crate) fn cuda(&self) -> Option<&cuda::Symmetric<u8>> {
        match &self.kind {
            Kind::Host(_) => None,
            Kind::Cuda(memory) => Some(memory),
        }
    }

    /// The addresses of arrays of `buffers` and `pads`, in the kind of memory that they describe.
    pub(crate) fn tables(&self) -> symmem::Result<(usize, usize)> {
        let Some(memory) = self.cuda() else {
            return Ok((self.buffers.as_ptr() as usize, self.pads.as_ptr() as usize));
        };
        let table = match self.table.get() {
            Some(table) => table,
            None => {
                // NVSHMEM's heap has memory only for all ranks together.
                let gpu = memory.gpu().with_backend(Some("cuda"), memory.group())?;
                let words = self.buffers.iter().chain(&self.pads).map(|word| *word as u64);
                let words: Vec<u64> = words.collect();
                let mut made = gpu.alloc(memory.group(), words.len())?;
                made.write(&words, &gpu.stream()?)?;
                self.table.get_or_init(|| made) // another thread's is as good
            }
        };
        let first = table.address() as usize;
        Ok((first, first + size_of::<u64>() * self.buffers.len()))
    }
}
