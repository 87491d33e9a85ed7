//! Modules, functions and launches.
#![allow(unsafe_code)] // S2

use std::ffi::c_void;

use super::state::{FunctionState, State};
use super::streams::given_back;
use super::work::{Work, stream_context};
use super::{Fake, Launched, Ptx, devices::device_of};
use crate::cuda::driver::{Kernels, refuse};
use crate::cuda::{Function, FunctionAttribute, Launch, Module, Result, code};

const THREADS_PER_BLOCK: u32 = 1024;
const THREADS_PER_SM: u32 = 2048;
const BLOCKS_PER_SM: u32 = 32;

impl Kernels for Fake {
    fn module_load(&self, ptx: &str) -> Result<Module> {
        let call = "cuModuleLoadDataEx";
        let mut state = self.enter(call)?;
        state.current(call)?;
        if !ptx.contains(".version") || !ptx.contains(".target") {
            return refuse(call, code::INVALID_PTX, "fake ptxas: no .version or no .target");
        }
        let number = state.number();
        state.modules.insert(number, Ptx(ptx.into()));
        Ok(Module::new(number))
    }

    unsafe fn module_unload(&self, module: Module) -> Result<()> {
        let call = "cuModuleUnload";
        let mut state = self.enter(call)?;
        state.functions.retain(|_, function| function.module != module.raw());
        given_back(call, state.modules.remove(&module.raw()))
    }

    fn module_function(&self, module: Module, name: &str) -> Result<Function> {
        let call = "cuModuleGetFunction";
        let mut state = self.enter(call)?;
        let Some(ptx) = state.modules.get(&module.raw()) else {
            return refuse(call, code::INVALID_HANDLE, "that is no module");
        };
        if !has_entry(&ptx.0, name) {
            return refuse(call, code::NOT_FOUND, format!("the module has no kernel {name}"));
        }
        let number = state.number();
        let (module, name) = (module.raw(), name.to_owned());
        state.functions.insert(number, FunctionState { module, name, dynamic_shared: 48 << 10 });
        Ok(Function::new(number))
    }

    fn function_attribute(&self, function: Function, which: FunctionAttribute) -> Result<i32> {
        let call = "cuFuncGetAttribute";
        let mut state = self.enter(call)?;
        let dynamic = function_of(call, &mut state, function)?.dynamic_shared;
        Ok(match which {
            FunctionAttribute::ThreadsPerBlock => THREADS_PER_BLOCK.cast_signed(),
            FunctionAttribute::SharedBytes | FunctionAttribute::LocalBytes => 0,
            FunctionAttribute::Registers => 32,
            FunctionAttribute::PtxVersion | FunctionAttribute::BinaryVersion => 90,
            FunctionAttribute::MaxDynamicShared => dynamic,
        })
    }

    fn function_set_attribute(
        &self,
        function: Function,
        which: FunctionAttribute,
        value: i32,
    ) -> Result<()> {
        let call = "cuFuncSetAttribute";
        let mut state = self.enter(call)?;
        let found = function_of(call, &mut state, function)?;
        if which != FunctionAttribute::MaxDynamicShared || !(0..=227 << 10).contains(&value) {
            return refuse(call, code::INVALID_VALUE, "that cannot be set");
        }
        found.dynamic_shared = value;
        Ok(())
    }

    fn max_active_blocks(&self, function: Function, threads: u32, _: usize) -> Result<u32> {
        let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        let mut state = self.enter(call)?;
        function_of(call, &mut state, function)?;
        Ok(active_blocks(threads))
    }

    unsafe fn launch(&self, launch: &Launch, parameters: &mut [*mut c_void]) -> Result<()> {
        let special = launch.cooperative || launch.programmatic;
        let call = if special { "cuLaunchKernelEx" } else { "cuLaunchKernel" };
        let (launched, kernel) = {
            let mut state = self.lock();
            self.check(call, &mut state, launch)?;
            let found = function_of(call, &mut state, launch.function)?;
            let (function, module) = (found.name.clone(), found.module);
            let Some(module) = state.modules.get(&module).cloned() else {
                return refuse(call, code::INVALID_HANDLE, "its module is gone");
            };
            let kernel = state.kernels.get(&function).cloned();
            let sizes = kernel.as_ref().map_or(&[][..], |kernel| &kernel.sizes);
            if kernel.is_some() && sizes.len() != parameters.len() {
                return refuse(call, code::INVALID_VALUE, "another number of parameters");
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
                shared: launch.shared,
                stream: launch.stream,
                cooperative: launch.cooperative,
                programmatic: launch.programmatic,
                count: parameters.len(),
                parameters: sizes.iter().zip(&*parameters).map(bytes).map(<[u8]>::to_vec).collect(),
            };
            (launched, kernel)
        };
        // SAFETY: the caller vouches for what the kernel does.
        unsafe { self.submit(call, launch.stream, vec![Work::Launch(launched, kernel)]) }
    }
}

impl Fake {
    /// Whether a launch is of a size that the device can take.
    fn check(&self, call: &'static str, state: &mut State, launch: &Launch) -> Result<()> {
        let product = |sizes: [u32; 3]| sizes.iter().map(|&size| u64::from(size)).product::<u64>();
        let (blocks, threads) = (product(launch.grid), product(launch.block));
        let dynamic = function_of(call, state, launch.function)?.dynamic_shared;
        let shared_fits = i64::from(launch.shared) <= i64::from(dynamic);
        if blocks == 0 || threads == 0 || threads > THREADS_PER_BLOCK.into() || !shared_fits {
            return refuse(call, code::INVALID_VALUE, "too large, or nothing at all");
        }
        let context = stream_context(call, state, launch.stream)?;
        let sms = self.config(call, device_of(context))?.sms.unsigned_abs();
        let at_once = u64::from(active_blocks(threads as u32)) * u64::from(sms);
        if launch.cooperative && blocks > at_once {
            let why = format!("{blocks} blocks, but only {at_once} fit at once");
            return refuse(call, code::COOPERATIVE_LAUNCH_TOO_LARGE, why);
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

fn function_of<'a>(
    call: &'static str,
    state: &'a mut State,
    function: Function,
) -> Result<&'a mut FunctionState> {
    match state.functions.get_mut(&function.raw()) {
        Some(found) => Ok(found),
        None => refuse(call, code::INVALID_HANDLE, "that is no kernel"),
    }
}
