//! All ranks' memory of one rendezvous, as the library has it: of the host, or of a device.

use std::sync::OnceLock;

use symmem::cuda;

pub(crate) struct Mapped {
    kind: Kind,
    /// The addresses of all ranks' memory and signal pads, by rank.
    pub(crate) buffers: Vec<usize>,
    pub(crate) pads: Vec<usize>,
    /// The same in the memory of a device, once somebody has asked.
    table: OnceLock<cuda::Buffer<u64>>,
}

enum Kind {
    Host(symmem::Handle),
    Cuda(Box<cuda::Symmetric<u8>>),
}

impl Mapped {
    pub(crate) fn host(handle: symmem::Handle) -> Self {
        let (buffers, pads) = (handle.buffer_ptrs(), handle.signal_pad_ptrs());
        Self { kind: Kind::Host(handle), buffers, pads, table: OnceLock::new() }
    }

    pub(crate) fn device(memory: cuda::Symmetric<u8>) -> Self {
        let (buffers, pads) = (memory.handle().buffer_ptrs(), memory.handle().signal_pad_ptrs());
        Self { kind: Kind::Cuda(Box::new(memory)), buffers, pads, table: OnceLock::new() }
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

    /// The addresses of tables of `buffers` and of `pads`, where whoever works on the memory reaches them.
    pub(crate) fn tables(&self) -> symmem::Result<(usize, usize)> {
        let Some(memory) = self.cuda() else {
            return Ok((self.buffers.as_ptr() as usize, self.pads.as_ptr() as usize));
        };
        let table = match self.table.get() {
            Some(table) => table,
            None => {
                let gpu = memory.gpu();
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
