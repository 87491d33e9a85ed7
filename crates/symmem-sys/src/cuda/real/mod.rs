//! The real driver: `libcuda.so.1` through a table of its functions.
#![allow(unsafe_code)] // S4

mod devices;
mod kernels;
mod memory;
mod streams;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::raw::{AccessDesc, AllocationProp, BatchMemOp, LaunchConfig, MulticastProp};
use super::{Failure, Result, code};
use crate::table::functions;
use crate::{Library, Missing};

/// The CUDA driver of this machine. Implements [`Driver`](super::Driver).
#[derive(Debug)]
pub struct Cuda {
    /// C's side.
    c: Functions,
}

impl Cuda {
    pub(super) fn open() -> std::result::Result<Self, Missing> {
        crate::load(Library::Cuda).map(|library| Self { c: Functions::new(library) })
    }
}

functions! {
    /// The driver's functions, from `cuda.h`. Handles are pointers, here as wide integers.
    struct Functions, Failure;
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
    cuGetErrorString(code: c_int, text: *mut *const c_char);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int);
    cuDeviceGetUuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: c_int);
    cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: c_int);
    cuDeviceTotalMem = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
    cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int);
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    cuDeviceGetP2PAttribute(value: *mut c_int, which: c_int, device: c_int, peer: c_int);
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int);
    cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    cuCtxSetCurrent(context: usize);
    cuCtxGetCurrent(context: *mut usize);
    cuCtxPushCurrent = "cuCtxPushCurrent_v2"(context: usize);
    cuCtxPopCurrent = "cuCtxPopCurrent_v2"(context: *mut usize);
    cuCtxGetDevice(device: *mut c_int);
    cuCtxSynchronize();
    cuMemGetInfo = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    cuMemGetAllocationGranularity(
        granularity: *mut usize, prop: *const AllocationProp, option: c_int);
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64);
    cuMemRelease(handle: u64);
    cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    cuMemAddressFree(address: u64, bytes: usize);
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, descriptions: *const AccessDesc, count: usize);
    cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_int, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_int);
    cuMemRetainAllocationHandle(handle: *mut u64, address: u64);
    cuPointerGetAttribute(value: *mut c_void, which: c_int, address: u64);
    cuMulticastGetGranularity(granularity: *mut usize, prop: *const MulticastProp, option: c_int);
    cuMulticastCreate(handle: *mut u64, prop: *const MulticastProp);
    cuMulticastAddDevice(handle: u64, device: c_int);
    cuMulticastBindMem(
        handle: u64, offset: usize, memory: u64, memory_offset: usize, bytes: usize, flags: u64);
    cuMulticastUnbind(handle: u64, device: c_int, offset: usize, bytes: usize);
    cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostGetDevicePointer = "cuMemHostGetDevicePointer_v2"(
        address: *mut u64, host: *mut c_void, flags: c_uint);
    cuMemFreeHost(host: *mut c_void);
    cuStreamCreate(stream: *mut usize, flags: c_uint);
    cuStreamDestroy = "cuStreamDestroy_v2"(stream: usize);
    cuStreamSynchronize(stream: usize);
    cuStreamQuery(stream: usize);
    cuStreamGetCtx(stream: usize, context: *mut usize);
    cuStreamGetCaptureInfo = "cuStreamGetCaptureInfo_v2"(
        stream: usize, status: *mut c_int, id: *mut u64, graph: *mut usize,
        dependencies: *mut *const usize, count: *mut usize);
    cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint);
    cuEventCreate(event: *mut usize, flags: c_uint);
    cuEventDestroy = "cuEventDestroy_v2"(event: usize);
    cuEventRecord(event: usize, stream: usize);
    cuEventSynchronize(event: usize);
    cuEventQuery(event: usize);
    cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
    cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: usize);
    cuMemsetD32Async(address: u64, value: u32, count: usize, stream: usize);
    cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync_v2"(
        to: u64, from: *const c_void, bytes: usize, stream: usize);
    cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync_v2"(
        to: *mut c_void, from: u64, bytes: usize, stream: usize);
    cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: usize);
    cuMemcpyPeerAsync(
        to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, stream: usize);
    cuStreamWriteValue32 = "cuStreamWriteValue32_v2"(
        stream: usize, address: u64, value: u32, flags: c_uint);
    cuStreamWaitValue32 = "cuStreamWaitValue32_v2"(
        stream: usize, address: u64, value: u32, flags: c_uint);
    cuStreamBatchMemOp = "cuStreamBatchMemOp_v2"(
        stream: usize, count: c_uint, operations: *mut BatchMemOp, flags: c_uint);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    cuStreamBeginCapture = "cuStreamBeginCapture_v2"(stream: usize, mode: c_int);
    cuStreamEndCapture(stream: usize, graph: *mut usize);
    cuGraphInstantiate = "cuGraphInstantiateWithFlags"(exec: *mut usize, graph: usize, flags: u64);
    cuGraphLaunch(exec: usize, stream: usize);
    cuGraphDestroy(graph: usize);
    cuGraphExecDestroy(exec: usize);
    cuModuleLoadDataEx(
        module: *mut usize, image: *const c_char, count: c_uint, options: *mut c_int,
        values: *mut *mut c_void);
    cuModuleUnload(module: usize);
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    cuFuncGetAttribute(value: *mut c_int, which: c_int, function: usize);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: usize, threads: c_int, shared: usize);
    cuLaunchKernel(
        function: usize, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared: c_uint, stream: usize,
        parameters: *mut *mut c_void, extra: *mut *mut c_void);
    cuLaunchKernelEx(
        config: *const LaunchConfig, function: usize, parameters: *mut *mut c_void,
        extra: *mut *mut c_void);
}

impl Functions {
    /// A code in the driver's words.
    fn failure(&self, call: &'static str, code: c_int) -> Failure {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: it only writes the pointer.
        let named = unsafe { self.cuGetErrorName(code, &mut name) };
        // SAFETY: it only writes the pointer.
        let explained = unsafe { self.cuGetErrorString(code, &mut text) };
        let mut failure = Failure::new(call, code, "");
        if named.is_ok() && !name.is_null() {
            // SAFETY: the driver's names are static strings.
            failure.name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        }
        if explained.is_ok() && !text.is_null() {
            // SAFETY: the driver's explanations are static strings.
            failure.text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        }
        failure
    }
}

/// Whether work has ended, from a call that answers "not ready" when it has not.
fn ended(answer: Result<()>) -> Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(failure) if failure.code == code::NOT_READY => Ok(false),
        Err(failure) => Err(failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Loaded;
    use crate::cuda::{Devices, HandleType, Kernels, MulticastProperties, VirtualMemory};

    #[test]
    fn a_symbol_that_is_not_there_is_a_failure_of_its_call() {
        let cuda = Cuda { c: Functions::new(Loaded::without_functions()) };
        let failure = cuda.version().unwrap_err();
        assert_eq!((failure.call, failure.code), ("cuDriverGetVersion", code::MISSING_SYMBOL));
        assert_eq!(failure.name, "missing symbol");
        let wanted = MulticastProperties { devices: 2, bytes: 2 << 20, handle: HandleType::Fd };
        let failure = cuda.multicast_create(&wanted).unwrap_err();
        assert_eq!(failure.call, "cuMulticastCreate");
        assert!(failure.is_unsupported());
        assert!(cuda.module_load("").unwrap_err().text.contains("cuModuleLoadDataEx"));
    }

    #[test]
    fn work_that_goes_on_is_no_failure() {
        let answer = |code| ended(Err(Failure::new("cuStreamQuery", code, "")));
        assert_eq!(ended(Ok(())), Ok(true));
        assert_eq!(answer(code::NOT_READY), Ok(false));
        assert!(answer(code::ILLEGAL_ADDRESS).is_err());
    }
}
