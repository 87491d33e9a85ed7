//! Modules, functions and launches.
#![allow(unsafe_code)] // S4

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use super::Cuda;
use crate::cuda::driver::{Kernels, refuse};
use crate::cuda::raw::{self, LaunchAttribute, LaunchConfig};
use crate::cuda::{Function, FunctionAttribute, Launch, Module, Result, code};
use crate::table::{methods, text, written};

/// Bytes of the compiler's log that are kept.
const LOG_BYTES: usize = 8192;

impl Kernels for Cuda {
    methods! {
        // The handle is live, and the caller does not use it again.
        unsafe fn module_unload(module: Module) = cuModuleUnload(module.raw());
        // The handle is live.
        fn function_attribute(function: Function, which: FunctionAttribute) -> i32 =
            |value| cuFuncGetAttribute(value, which as c_int, function.raw());
    }

    fn module_load(&self, ptx: &str) -> Result<Module> {
        let image = c_string("cuModuleLoadDataEx", ptx)?;
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options = [raw::JIT_ERROR_LOG, raw::JIT_ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast(), without_provenance_mut(LOG_BYTES)];
        let (mut module, options, values) = (0, options.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: the image ends with a zero; the log is as long as the second option says.
        unsafe { self.c.cuModuleLoadDataEx(&mut module, image.as_ptr(), 2, options, values) }
            .map_err(|mut failure| {
                let log = text(&log);
                if !log.trim().is_empty() {
                    failure.text = format!("{}: {}", failure.text, log.trim());
                }
                failure
            })?;
        Ok(Module::new(module))
    }

    fn module_function(&self, module: Module, name: &str) -> Result<Function> {
        let name = c_string("cuModuleGetFunction", name)?;
        // SAFETY: the handle is live, the name ends with a zero.
        written(|found| unsafe { self.c.cuModuleGetFunction(found, module.raw(), name.as_ptr()) })
            .map(Function::new)
    }

    fn max_active_blocks(&self, function: Function, threads: u32) -> Result<u32> {
        const CALL: &str = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        let Ok(threads) = c_int::try_from(threads) else {
            return refuse(CALL, code::INVALID_VALUE, "too many threads");
        };
        let (c, f) = (&self.c, function.raw());
        // SAFETY: the handle is live.
        let blocks = written(|blocks| unsafe {
            c.cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, 0)
        })?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    unsafe fn launch(&self, launch: &Launch, parameters: &[*mut c_void]) -> Result<()> {
        let ([x, y, z], [bx, by, bz]) = (launch.grid, launch.block);
        let (function, stream) = (launch.function.raw(), launch.stream.raw());
        let parameters = parameters.as_ptr().cast_mut(); // it only reads them
        if !launch.cooperative && !launch.programmatic {
            let (c, none) = (&self.c, null_mut());
            // SAFETY: the caller vouches for the parameters and for what the kernel does.
            return unsafe {
                c.cuLaunchKernel(function, x, y, z, bx, by, bz, 0, stream, parameters, none)
            };
        }
        // No vector: this is on the way of every call.
        let both = [raw::LAUNCH_COOPERATIVE, raw::LAUNCH_PROGRAMMATIC].map(LaunchAttribute::on);
        let attributes = match (launch.cooperative, launch.programmatic) {
            (true, true) => &both[..],
            (true, false) => &both[..1],
            _ => &both[1..],
        };
        let config = LaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared: 0,
            stream,
            attributes: attributes.as_ptr(),
            count: attributes.len() as c_uint,
        };
        // SAFETY: as above; the attributes are as many as the configuration says.
        unsafe { self.c.cuLaunchKernelEx(&config, function, parameters, null_mut()) }
    }
}

fn c_string(call: &'static str, text: &str) -> Result<CString> {
    CString::new(text).or_else(|_| refuse(call, code::INVALID_VALUE, "there is a zero in the text"))
}
