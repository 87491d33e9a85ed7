//! Modules, functions and launches.
#![allow(unsafe_code)] // S2

use std::ffi::c_void;

use super::state::{FunctionState, State};
use super::work::Work;
use super::{Fake, Launched, Ptx, devices::device_of};
use crate::cuda::driver::Kernels;
use crate::cuda::{Failure, Function, FunctionAttribute, Launch, Module, Result, code};

const THREADS_PER_BLOCK: u32 = 1024;
const THREADS_PER_SM: u32 = 2048;
const BLOCKS_PER_SM: u32 = 32;

impl Kernels for Fake {
    fn module_load(&self, ptx: &str) -> Result<Module> {
        let mut state = self.enter("cuModuleLoadDataEx")?;
        state.current()?;
        if !ptx.contains(".version") || !ptx.contains(".target") {
            return state.refuse(code::INVALID_PTX, "fake ptxas: no .version or no .target");
        }
        let number = state.number();
        state.modules.insert(number, Ptx(ptx.into()));
        Ok(Module::new(number))
    }

    unsafe fn module_unload(&self, module: Module) -> Result<()> {
        let mut state = self.enter("cuModuleUnload")?;
        state.functions.retain(|_, function| function.module != module.raw());
        let gone = state.modules.remove(&module.raw());
        state.given_back(gone)
    }

    fn module_function(&self, module: Module, name: &str) -> Result<Function> {
        let mut state = self.enter("cuModuleGetFunction")?;
        let Some(ptx) = state.modules.get(&module.raw()) else {
            return state.refuse(code::INVALID_HANDLE, "that is no module");
        };
        if !has_entry(&ptx.0, name) {
            return state.refuse(code::NOT_FOUND, format!("the module has no kernel {name}"));
        }
        let number = state.number();
        let (module, name) = (module.raw(), name.to_owned());
        state.functions.insert(number, FunctionState { module, name });
        Ok(Function::new(number))
    }

    fn function_attribute(&self, function: Function, which: FunctionAttribute) -> Result<i32> {
        let mut state = self.enter("cuFuncGetAttribute")?;
        state.function_of(function)?;
        Ok(match which {
            FunctionAttribute::Registers => 32,
        })
    }

    fn max_active_blocks(&self, function: Function, threads: u32) -> Result<u32> {
        let mut state = self.enter("cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        state.function_of(function)?;
        Ok(active_blocks(threads))
    }

    unsafe fn launch(&self, launch: &Launch, parameters: &[*mut c_void]) -> Result<()> {
        let special = launch.cooperative || launch.programmatic;
        let call = if special { "cuLaunchKernelEx" } else { "cuLaunchKernel" };
        let (launched, kernel) = {
            let mut state = self.begin(call);
            state.check_launch(launch)?;
            let FunctionState { name: function, module, .. } =
                state.function_of(launch.function)?.clone();
            let Some(module) = state.modules.get(&module).cloned() else {
                return state.refuse(code::INVALID_HANDLE, "its module is gone");
            };
            let kernel = state.kernels.get(&function).cloned();
            let sizes = kernel.as_ref().map_or(&[][..], |kernel| &kernel.sizes);
            if kernel.is_some() && sizes.len() != parameters.len() {
                return state.refuse(code::INVALID_VALUE, "another number of parameters");
            }
            // SAFETY: the caller vouches that each parameter is what the kernel takes: here, the one that is set.
            let bytes = |(&size, pointer): (&usize, &*mut c_void)| unsafe {
                std::slice::from_raw_parts(pointer.cast::<u8>(), size)
            };
            let launched = Launched {
                function,
                module,
                grid: launch.grid,
                block: launch.block,
                stream: launch.stream,
                cooperative: launch.cooperative,
                programmatic: launch.programmatic,
                count: parameters.len(),
                parameters: sizes.iter().zip(parameters).map(bytes).map(<[u8]>::to_vec).collect(),
            };
            (launched, kernel)
        };
        // SAFETY: the caller vouches for what the kernel does.
        unsafe { self.submit(call, launch.stream, vec![Work::Launch(launched, kernel)]) }
    }
}

impl State {
    fn function_of(&mut self, function: Function) -> Result<&mut FunctionState> {
        let call = self.call;
        let none = || Failure::new(call, code::INVALID_HANDLE, "that is no kernel");
        self.functions.get_mut(&function.raw()).ok_or_else(none)
    }

    /// Whether a launch is of a size that the device can take.
    fn check_launch(&mut self, launch: &Launch) -> Result<()> {
        let product = |sizes: [u32; 3]| sizes.iter().map(|&size| u64::from(size)).product::<u64>();
        let (blocks, threads) = (product(launch.grid), product(launch.block));
        self.function_of(launch.function)?;
        if blocks == 0 || threads == 0 || threads > THREADS_PER_BLOCK.into() {
            return self.refuse(code::INVALID_VALUE, "too large, or nothing at all");
        }
        let context = self.context_of(launch.stream)?;
        let sms = self.config(device_of(context))?.sms.unsigned_abs();
        let at_once = u64::from(active_blocks(threads as u32)) * u64::from(sms);
        if launch.cooperative && blocks > at_once {
            let why = format!("{blocks} blocks, but only {at_once} fit at once");
            return self.refuse(code::COOPERATIVE_LAUNCH_TOO_LARGE, why);
        }
        Ok(())
    }
}

fn active_blocks(threads: u32) -> u32 {
    (THREADS_PER_SM / threads.max(1)).min(BLOCKS_PER_SM)
}

/// Whether the text declares a kernel of that name.
fn has_entry(ptx: &str, name: &str) -> bool {
    ptx.split(".entry").skip(1).any(|rest| {
        let end = |c: char| !c.is_alphanumeric() && c != '_' && c != '$';
        rest.trim_start().split(end).next() == Some(name)
    })
}
