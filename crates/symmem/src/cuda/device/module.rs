//! Your own kernels, with or without `symmem.cuh`.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use symmem_sys::cuda::{self as sys, Launch};

use crate::cuda::device::gpu::{Gpu, InUse};
use crate::cuda::stream::Stream;
use crate::error::Result;

/// The text of `kernels/symmem.cuh`, which needs no other header: signals and pointers for your own kernels.
pub const HEADER: &str = include_str!("../../../kernels/symmem.cuh");

/// Code that is loaded on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Module(Arc<InUse<Loaded>>);

#[derive(Debug)]
struct Loaded {
    gpu: Gpu,
    raw: sys::Module,
}

/// A kernel of a [`Module`], which it keeps loaded.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Module,
    raw: sys::Function,
}

/// A value for a parameter of a kernel: `(&value).into()`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Parameter<'a> {
    value: *mut c_void,
    of: PhantomData<&'a ()>,
}

impl<'a, T: Copy> From<&'a T> for Parameter<'a> {
    fn from(value: &'a T) -> Self {
        Self { value: std::ptr::from_ref(value).cast_mut().cast(), of: PhantomData }
    }
}

impl Parameter<'_> {
    /// As the driver gets them.
    pub(super) fn pointers(list: &[Self]) -> &[*mut c_void] {
        // SAFETY: S4: each is a pointer and nothing else.
        unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), list.len()) }
    }
}

impl Gpu {
    /// Loads PTX, which the driver compiles for this device. Its errors contain the driver's message.
    pub fn module(&self, ptx: &str) -> Result<Module> {
        let raw = self.call(|driver| driver.module_load(ptx))?;
        Ok(Module(Arc::new(self.in_use(Loaded { gpu: self.clone(), raw }))))
    }
}

impl Module {
    pub(crate) fn raw(&self) -> sys::Module {
        self.0.raw
    }

    /// The kernel of this name, as `extern "C"` leaves it.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let raw = self.0.gpu.call(|driver| driver.module_function(self.0.raw, name))?;
        Ok(Kernel { module: self.clone(), raw })
    }
}

impl Kernel {
    /// How many blocks of so many threads the device holds at once. A kernel whose blocks wait for those of other ranks
    /// may have no more, and ranks on one device share that number.
    pub fn max_blocks(&self, threads: u32) -> Result<u32> {
        let gpu = &self.module.0.gpu;
        let each = gpu.call(|driver| driver.max_active_blocks(self.raw, threads))?;
        Ok(each * gpu.opened.multiprocessors)
    }

    /// Puts the kernel into `stream`, with `grid` blocks of `block` threads.
    ///
    /// The parameters are read before this returns. The kernel follows what is in the stream; it is not ordered with
    /// collectives in other streams.
    ///
    /// # Safety
    /// There is one value for each parameter of the kernel, of its type. What the kernel does with them is sound when it
    /// runs: memory whose address it gets lives until then, and nobody else touches what it writes, nor writes what it
    /// reads, unless its signals order that.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        stream: &Stream,
        parameters: &[Parameter<'_>],
    ) -> Result<()> {
        let gpu = &self.module.0.gpu;
        stream.check_gpu("launch", gpu)?;
        let launch = Launch { grid, block, ..Launch::new(self.raw, 1, 1, stream.raw()) };
        gpu.call(|driver| {
            // SAFETY: as the caller promises; the driver only reads the values.
            unsafe { driver.launch(&launch, Parameter::pointers(parameters)) }
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: S4: loaded by us, nobody can launch anything of it, and all is done that was in any stream.
        self.gpu.give_back(|driver| unsafe { driver.module_unload(self.raw) });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use symmem_sys::cuda::fake::Fake;

    use super::*;
    use crate::Error;

    const PTX: &str = ".version 8.4\n.target sm_80\n.visible .entry scale(.param .u32 n) { ret; }";

    #[test]
    fn a_kernel_of_the_callers_is_launched_with_its_parameters() {
        let fake = Fake::plain(1);
        let sum = Arc::new(AtomicU32::new(0));
        let into = Arc::clone(&sum);
        fake.kernel("scale", &[4, 8], move |launched| {
            let values = (launched.u32(0).unwrap(), launched.u64(1).unwrap());
            into.fetch_add(values.0 + values.1 as u32, Ordering::Relaxed);
        });
        let gpu = Gpu::with_driver(fake.clone(), 0).unwrap();
        let stream = gpu.stream().unwrap();
        let kernel = gpu.module(PTX).unwrap().kernel("scale").unwrap();
        assert!(kernel.max_blocks(256).unwrap() > 0);
        let (a, b) = (3_u32, 4_u64);
        let list = [Parameter::from(&a), (&b).into()];
        // SAFETY: the parameters that the fake's kernel takes; it touches no memory.
        unsafe { kernel.launch([2, 1, 1], [32, 1, 1], &stream, &list) }.unwrap();
        stream.synchronize().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 7);
        let launched = fake.launches().pop().unwrap();
        assert_eq!((launched.grid, launched.block), ([2, 1, 1], [32, 1, 1]));
        drop((kernel, stream));
        assert_eq!(fake.calls("cuModuleUnload"), 1);
        drop(gpu);
        assert_eq!(fake.live(), Vec::<String>::new());
    }

    #[test]
    fn a_name_that_is_not_there_and_a_stream_of_another_device_are_refused() {
        let fake = Fake::plain(2);
        let (gpu, other) = (
            Gpu::with_driver(fake.clone(), 0).unwrap(),
            Gpu::with_driver(fake.clone(), 1).unwrap(),
        );
        let module = gpu.module(PTX).unwrap();
        assert!(matches!(module.kernel("shift"), Err(Error::Driver { .. })));
        let stream = other.stream().unwrap();
        let kernel = module.kernel("scale").unwrap();
        // SAFETY: nothing is launched.
        let refused = unsafe { kernel.launch([1; 3], [1; 3], &stream, &[]) };
        assert!(matches!(refused, Err(Error::Usage { op: "launch", .. })), "{refused:?}");
        assert!(fake.launches().is_empty());
    }
}
