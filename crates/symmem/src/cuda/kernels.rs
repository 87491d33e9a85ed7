//! The library's own kernels: PTX that the driver compiles for the device, each file when something of it is first wanted.
#![allow(unsafe_code)] // S4

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use symmem_sys::cuda::{Context, Driver, Function, Launch, Module};

use super::gpu::Gpu;
use super::room::Grids;
use super::stream::Place;
use crate::error::{Error, Result};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The PTX of each file.
        const FILES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../../kernels/ptx/", $name, ".ptx")))),*];
    };
}

files!(
    "move",
    "rows",
    "reduce_f64",
    "reduce_f32",
    "reduce_f16",
    "reduce_bf16",
    "reduce_f8e4m3",
    "reduce_f8e5m2",
    "reduce_i8",
    "reduce_i16",
    "reduce_i32",
    "reduce_i64",
    "reduce_u8",
    "reduce_u16",
    "reduce_u32",
    "reduce_u64",
    "move_90",
    "reduce_f32_90",
    "reduce_f16_90",
    "reduce_bf16_90",
    "tiles_f32",
    "tiles_f16",
    "tiles_bf16",
    "multimem_f32",
    "multimem_f16",
    "multimem_bf16",
);

/// What is loaded on one device.
#[derive(Default)]
pub(super) struct Kernels(Mutex<Loaded>);

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    /// Few, and looked for at every launch.
    functions: Vec<(Key, BuiltIn)>,
}

/// Threads of a block, the kernel's name, its file.
type Key = (u32, &'static str, &'static str);

/// A kernel, for blocks of a number of threads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct BuiltIn {
    function: Function,
    threads: u32,
    /// Blocks that the device holds at once.
    pub(super) fit: u32,
    /// It waits by itself for the kernel before it, and can be launched before that has ended.
    early: bool,
}

impl Kernels {
    /// Gives everything back.
    pub(super) fn unload(&mut self, driver: &dyn Driver, context: Context) {
        let loaded = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if loaded.modules.is_empty() || driver.context_push(context).is_err() {
            return;
        }
        for (_, module) in loaded.modules.drain() {
            // SAFETY: S4: loaded by us; whoever could launch something of it is gone.
            if let Err(e) = unsafe { driver.module_unload(module) } {
                tracing::warn!("{e}");
            }
        }
        let _ = driver.context_pop();
    }
}

impl Gpu {
    /// The kernel `name` of the file `file`, for blocks of so many threads.
    pub(super) fn kernel(
        &self,
        file: &'static str,
        name: &'static str,
        threads: u32,
    ) -> Result<BuiltIn> {
        let mut loaded = self.kernels().0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (threads, name, file);
        if let Some((_, kernel)) = loaded.functions.iter().find(|(known, _)| *known == key) {
            return Ok(*kernel);
        }
        let newer = FILES.iter().find(|(known, _)| {
            self.is_hopper() && known.strip_suffix("_90").is_some_and(|known| known == file)
        });
        let known = newer.or_else(|| FILES.iter().find(|(known, _)| *known == file));
        let (file, ptx) = known.ok_or_else(|| Error::Unavailable {
            what: format!("the kernels {file}"),
            why: "there are none".into(),
        })?;
        let module = match loaded.modules.get(file) {
            Some(module) => *module,
            None => {
                let module = self.call(|driver| driver.module_load(ptx))?;
                loaded.modules.insert(file, module);
                module
            }
        };
        let (function, each) = self.call(|driver| {
            let function = driver.module_function(module, name)?;
            Ok((function, driver.max_active_blocks(function, threads, 0)?))
        })?;
        let fit = each * self.multiprocessors();
        let kernel = BuiltIn { function, threads, fit, early: newer.is_some() };
        loaded.functions.push((key, kernel));
        Ok(kernel)
    }

    /// Puts a kernel of so many blocks there, on a device on which `crowd` ranks do so.
    ///
    /// # Safety
    /// `parameters` point to a value of the right type for each parameter, and what the kernel does with them is sound
    /// when it runs.
    pub(super) unsafe fn launch(
        &self,
        kernel: BuiltIn,
        blocks: u32,
        crowd: usize,
        place: Place<'_>,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let stream = place.stream;
        let place = (stream.id(), place.capture);
        let mut launch = Launch::new(kernel.function, blocks, kernel.threads, stream.raw());
        let grids = Grids { blocks: blocks * crowd as u32, fit: kernel.fit };
        launch.programmatic = self.room().enter(place, grids) && kernel.early;
        let launched = self.call(|driver| {
            // SAFETY: as the caller promises.
            unsafe { driver.launch(&launch, parameters) }
        });
        launched.inspect_err(|_| self.room().forget(place))
    }
}

/// The pointers to the parameters of a launch, which live as long as the values.
macro_rules! parameters {
    ($($value:expr),* $(,)?) => {
        &mut [$(std::ptr::from_mut(&mut $value).cast::<std::ffi::c_void>()),*]
    };
}
pub(super) use parameters;

#[cfg(test)]
mod tests {
    use super::*;

    /// Those that may be launched before the ones before them have ended.
    #[test]
    fn kernels_that_may_come_early_wait_by_themselves() {
        let newer = FILES.iter().filter(|(file, _)| file.ends_with("_90"));
        let kernels: Vec<&str> = newer.flat_map(|(_, ptx)| ptx.split(".entry ").skip(1)).collect();
        assert!(kernels.len() > 20);
        for kernel in kernels {
            let name = kernel.split('(').next().unwrap_or_default();
            assert!(kernel.contains("griddepcontrol.wait;"), "{name}");
        }
    }
}
