//! The library's own kernels: PTX that the driver compiles for the device, each file when something of it is first wanted.
#![allow(unsafe_code)] // S4

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Mutex, PoisonError};

use ruzstd::decoding::StreamingDecoder;
use symmem_sys::cuda::{Context, Driver, Function, Launch, Module};

use crate::cuda::device::gpu::Gpu;
use crate::cuda::device::module::Parameter;
use crate::cuda::device::occupancy::Grids;
use crate::cuda::stream::Target;
use crate::error::{Error, Result};
use crate::sync::lock;

/// All PTX, compressed as a whole: each file after a line with its name and length.
const ARCHIVE: &[u8] = include_bytes!("../../../kernels/ptx.zst");

/// All PTX files that the library carries, by name.
#[doc(hidden)]
pub fn ptx_files() -> Result<Vec<(String, String)>> {
    let broken = |why: String| Error::unavailable("the library's kernels", why);
    let mut decoder = StreamingDecoder::new(ARCHIVE).map_err(|e| broken(e.to_string()))?;
    let mut text = String::new();
    decoder.read_to_string(&mut text).map_err(|e| broken(e.to_string()))?;
    let (mut rest, mut files) = (text.as_str(), Vec::new());
    while let Some((head, body)) = rest.split_once('\n') {
        let (name, length) = head.split_once(' ').unwrap_or((head, ""));
        let file = length.parse().ok().and_then(|length: usize| body.split_at_checked(length));
        let (file, next) = file.ok_or_else(|| broken(format!("their archive ends in {name}")))?;
        files.push((name.to_owned(), file.to_owned()));
        rest = next;
    }
    Ok(files)
}

/// What is loaded on one device.
#[derive(Default)]
pub(crate) struct Kernels(Mutex<Loaded>);

#[derive(Default)]
struct Loaded {
    /// With whether its kernels may be launched early.
    modules: HashMap<&'static str, (Module, bool)>,
    /// Few, and looked for at every launch.
    functions: Vec<(Key, BuiltIn)>,
}

/// Threads of a block, the kernel's name, its file.
type Key = (u32, &'static str, &'static str);

/// A kernel, for blocks of a number of threads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct BuiltIn {
    function: Function,
    threads: u32,
    /// Blocks that the device holds at once.
    pub(crate) fit: u32,
    /// It waits by itself for the kernel before it, and can be launched before that has ended.
    early: bool,
}

impl Kernels {
    /// Gives everything back.
    pub(crate) fn unload(&mut self, driver: &dyn Driver, context: Context) {
        let loaded = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if loaded.modules.is_empty() || driver.context_push(context).is_err() {
            return;
        }
        for (_, (module, _)) in loaded.modules.drain() {
            // SAFETY: S4: loaded by us; nothing is left that could launch something of it.
            unsafe { driver.module_unload(module) }.unwrap_or_else(|e| tracing::warn!("{e}"));
        }
        let _ = driver.context_pop();
    }
}

impl Gpu {
    /// The kernel `name` of the file `file`, for blocks of so many threads.
    #[inline(never)] // as `launch`
    pub(crate) fn kernel(
        &self,
        file: &'static str,
        name: &'static str,
        threads: u32,
    ) -> Result<BuiltIn> {
        let mut loaded = lock(&self.opened.kernels.0);
        let key = (threads, name, file);
        if let Some((_, kernel)) = loaded.functions.iter().find(|(known, _)| *known == key) {
            return Ok(*kernel);
        }
        let (module, early) = match loaded.modules.get(file) {
            Some(known) => *known,
            None => {
                let made = self.load(file)?;
                loaded.modules.insert(file, made);
                made
            }
        };
        let (function, each) = self.call(|driver| {
            let function = driver.module_function(module, name)?;
            Ok((function, driver.max_active_blocks(function, threads)?))
        })?;
        let fit = each * self.opened.multiprocessors;
        let kernel = BuiltIn { function, threads, fit, early };
        loaded.functions.push((key, kernel));
        Ok(kernel)
    }

    /// Loads a file, in the form for newer devices where this is one and there is such; and whether it was that.
    fn load(&self, file: &'static str) -> Result<(Module, bool)> {
        let files = ptx_files()?;
        let find = |name: &str| files.iter().find(|(known, _)| known == name);
        let newer = find(&format!("{file}_90")).filter(|_| self.opened.capability.0 >= 9);
        let (_, text) = newer
            .or_else(|| find(file))
            .ok_or_else(|| Error::unavailable(format!("the kernels {file}"), "there are none"))?;
        self.call(|driver| driver.module_load(text)).map(|module| (module, newer.is_some()))
    }

    /// Puts a kernel of so many blocks there, on a device on which `ranks_per_device` ranks do so.
    ///
    /// # Safety
    /// `parameters` point to a value of the right type for each parameter, and what the kernel does with them is sound
    /// when it runs.
    #[inline(never)] // every operation has a call of it for each element type
    pub(crate) unsafe fn launch(
        &self,
        kernel: BuiltIn,
        blocks: u32,
        ranks_per_device: usize,
        target: Target<'_>,
        parameters: &[Parameter<'_>],
    ) -> Result<()> {
        let stream = target.stream;
        let target = (stream.id(), target.capture);
        let mut launch = Launch::new(kernel.function, blocks, kernel.threads, stream.raw());
        let grids = Grids { blocks: blocks * ranks_per_device as u32, fit: kernel.fit };
        launch.programmatic = self.opened.occupancy.enter(target, grids) && kernel.early;
        let launched = self.call(|driver| {
            // SAFETY: as the caller promises.
            unsafe { driver.launch(&launch, Parameter::pointers(parameters)) }
        });
        launched.inspect_err(|_| self.opened.occupancy.forget(target))
    }
}

/// The parameters of a launch, which borrow the values.
macro_rules! parameters {
    ($($value:expr),* $(,)?) => {
        &[$($crate::cuda::Parameter::from(&$value)),*]
    };
}
pub(crate) use parameters;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Those that may be launched before the ones before them have ended.
    #[test]
    fn kernels_that_may_come_early_wait_by_themselves() {
        let files = ptx_files().unwrap();
        let newer = files.iter().filter(|(file, _)| file.ends_with("_90"));
        let kernels: Vec<&str> = newer.flat_map(|(_, ptx)| ptx.split(".entry ").skip(1)).collect();
        assert!(kernels.len() > 20);
        for kernel in kernels {
            let name = kernel.split('(').next().unwrap_or_default();
            assert!(kernel.contains("griddepcontrol.wait;"), "{name}");
        }
    }

    #[test]
    fn every_element_type_has_its_kernels() {
        let files = ptx_files().unwrap();
        for dtype in DType::ALL {
            let own = files.iter().find(|(file, _)| Some(file.as_str()) == dtype.kernels());
            assert!(own.is_some_and(|(_, ptx)| ptx.contains("reduce_pull")), "{dtype}");
        }
    }
}
