//! The real driver: `libcuda.so.1` through a table of its functions.
#![allow(unsafe_code)] // S4

mod devices;
mod kernels;
mod memory;
mod streams;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

use super::raw::{AccessDesc, AllocationProp, BatchMemOp, LaunchConfig, MulticastProp};
use super::{Failure, Result, code};
use crate::table::functions;
use crate::{Library, Loaded, Missing};

/// The CUDA driver of this machine. Implements [`Driver`](super::Driver).
pub struct Cuda {
    /// C's side.
    c: Functions,
    library: Loaded,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cuda").field(&self.library).finish()
    }
}

impl Cuda {
    pub(super) fn open() -> std::result::Result<Self, Missing> {
        let library = crate::load(Library::Cuda)?;
        Ok(Self { c: Functions::new(&library), library })
    }
}

functions! {
    /// The driver's functions, from `cuda.h`. Handles are pointers, here as wide integers.
    struct Functions, Failure;
    cuInit = "cuInit"(flags: c_uint);
    cuDriverGetVersion = "cuDriverGetVersion"(version: *mut c_int);
    cuGetErrorName = "cuGetErrorName"(code: c_int, name: *mut *const c_char);
    cuGetErrorString = "cuGetErrorString"(code: c_int, text: *mut *const c_char);
    cuDeviceGetCount = "cuDeviceGetCount"(count: *mut c_int);
    cuDeviceGet = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
    cuDeviceGetName = "cuDeviceGetName"(name: *mut c_char, length: c_int, device: c_int);
    cuDeviceGetUuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: c_int);
    cuDeviceGetPCIBusId = "cuDeviceGetPCIBusId"(id: *mut c_char, length: c_int, device: c_int);
    cuDeviceTotalMem = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
    cuDeviceGetAttribute = "cuDeviceGetAttribute"(value: *mut c_int, which: c_int, device: c_int);
    cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer"(can: *mut c_int, device: c_int, peer: c_int);
    cuDeviceGetP2PAttribute = "cuDeviceGetP2PAttribute"(
        value: *mut c_int, which: c_int, device: c_int, peer: c_int);
    cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain"(context: *mut usize, device: c_int);
    cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    cuCtxSetCurrent = "cuCtxSetCurrent"(context: usize);
    cuCtxGetCurrent = "cuCtxGetCurrent"(context: *mut usize);
    cuCtxPushCurrent = "cuCtxPushCurrent_v2"(context: usize);
    cuCtxPopCurrent = "cuCtxPopCurrent_v2"(context: *mut usize);
    cuCtxGetDevice = "cuCtxGetDevice"(device: *mut c_int);
    cuCtxSynchronize = "cuCtxSynchronize"();
    cuMemGetInfo = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    cuMemGetAllocationGranularity = "cuMemGetAllocationGranularity"(
        granularity: *mut usize, prop: *const AllocationProp, option: c_int);
    cuMemCreate = "cuMemCreate"(
        handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64);
    cuMemRelease = "cuMemRelease"(handle: u64);
    cuMemAddressReserve = "cuMemAddressReserve"(
        address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    cuMemAddressFree = "cuMemAddressFree"(address: u64, bytes: usize);
    cuMemMap = "cuMemMap"(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap = "cuMemUnmap"(address: u64, bytes: usize);
    cuMemSetAccess = "cuMemSetAccess"(
        address: u64, bytes: usize, descriptions: *const AccessDesc, count: usize);
    cuMemExportToShareableHandle = "cuMemExportToShareableHandle"(
        shareable: *mut c_void, handle: u64, kind: c_int, flags: u64);
    cuMemImportFromShareableHandle = "cuMemImportFromShareableHandle"(
        handle: *mut u64, shareable: *mut c_void, kind: c_int);
    cuMemRetainAllocationHandle = "cuMemRetainAllocationHandle"(handle: *mut u64, address: u64);
    cuPointerGetAttribute = "cuPointerGetAttribute"(
        value: *mut c_void, which: c_int, address: u64);
    cuMulticastGetGranularity = "cuMulticastGetGranularity"(
        granularity: *mut usize, prop: *const MulticastProp, option: c_int);
    cuMulticastCreate = "cuMulticastCreate"(handle: *mut u64, prop: *const MulticastProp);
    cuMulticastAddDevice = "cuMulticastAddDevice"(handle: u64, device: c_int);
    cuMulticastBindMem = "cuMulticastBindMem"(
        handle: u64, offset: usize, memory: u64, memory_offset: usize, bytes: usize, flags: u64);
    cuMulticastUnbind = "cuMulticastUnbind"(
        handle: u64, device: c_int, offset: usize, bytes: usize);
    cuMemHostAlloc = "cuMemHostAlloc"(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostGetDevicePointer = "cuMemHostGetDevicePointer_v2"(
        address: *mut u64, host: *mut c_void, flags: c_uint);
    cuMemFreeHost = "cuMemFreeHost"(host: *mut c_void);
    cuStreamCreate = "cuStreamCreate"(stream: *mut usize, flags: c_uint);
    cuStreamDestroy = "cuStreamDestroy_v2"(stream: usize);
    cuStreamSynchronize = "cuStreamSynchronize"(stream: usize);
    cuStreamQuery = "cuStreamQuery"(stream: usize);
    cuStreamGetCtx = "cuStreamGetCtx"(stream: usize, context: *mut usize);
    cuStreamGetCaptureInfo = "cuStreamGetCaptureInfo_v2"(
        stream: usize, status: *mut c_int, id: *mut u64, graph: *mut usize,
        dependencies: *mut *const usize, count: *mut usize);
    cuStreamWaitEvent = "cuStreamWaitEvent"(stream: usize, event: usize, flags: c_uint);
    cuEventCreate = "cuEventCreate"(event: *mut usize, flags: c_uint);
    cuEventDestroy = "cuEventDestroy_v2"(event: usize);
    cuEventRecord = "cuEventRecord"(event: usize, stream: usize);
    cuEventSynchronize = "cuEventSynchronize"(event: usize);
    cuEventQuery = "cuEventQuery"(event: usize);
    cuEventElapsedTime = "cuEventElapsedTime"(milliseconds: *mut f32, start: usize, end: usize);
    cuMemsetD8Async = "cuMemsetD8Async"(address: u64, value: u8, bytes: usize, stream: usize);
    cuMemsetD32Async = "cuMemsetD32Async"(address: u64, value: u32, count: usize, stream: usize);
    cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync_v2"(
        to: u64, from: *const c_void, bytes: usize, stream: usize);
    cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync_v2"(
        to: *mut c_void, from: u64, bytes: usize, stream: usize);
    cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: usize);
    cuMemcpyPeerAsync = "cuMemcpyPeerAsync"(
        to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, stream: usize);
    cuStreamWriteValue32 = "cuStreamWriteValue32_v2"(
        stream: usize, address: u64, value: u32, flags: c_uint);
    cuStreamWaitValue32 = "cuStreamWaitValue32_v2"(
        stream: usize, address: u64, value: u32, flags: c_uint);
    cuStreamBatchMemOp = "cuStreamBatchMemOp_v2"(
        stream: usize, count: c_uint, operations: *mut BatchMemOp, flags: c_uint);
    cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);
    cuStreamBeginCapture = "cuStreamBeginCapture_v2"(stream: usize, mode: c_int);
    cuStreamEndCapture = "cuStreamEndCapture"(stream: usize, graph: *mut usize);
    cuGraphInstantiate = "cuGraphInstantiateWithFlags"(exec: *mut usize, graph: usize, flags: u64);
    cuGraphLaunch = "cuGraphLaunch"(exec: usize, stream: usize);
    cuGraphDestroy = "cuGraphDestroy"(graph: usize);
    cuGraphExecDestroy = "cuGraphExecDestroy"(exec: usize);
    cuModuleLoadDataEx = "cuModuleLoadDataEx"(
        module: *mut usize, image: *const c_char, count: c_uint, options: *mut c_int,
        values: *mut *mut c_void);
    cuModuleUnload = "cuModuleUnload"(module: usize);
    cuModuleGetFunction = "cuModuleGetFunction"(
        function: *mut usize, module: usize, name: *const c_char);
    cuFuncGetAttribute = "cuFuncGetAttribute"(value: *mut c_int, which: c_int, function: usize);
    cuFuncSetAttribute = "cuFuncSetAttribute"(function: usize, which: c_int, value: c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(
        blocks: *mut c_int, function: usize, threads: c_int, shared: usize);
    cuLaunchKernel = "cuLaunchKernel"(
        function: usize, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared: c_uint, stream: usize,
        parameters: *mut *mut c_void, extra: *mut *mut c_void);
    cuLaunchKernelEx = "cuLaunchKernelEx"(
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

/// The text in a buffer, up to the first zero.
fn text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Devices, HandleType, Kernels, MulticastProperties, VirtualMemory};

    #[test]
    fn a_symbol_that_is_not_there_is_a_failure_of_its_call() {
        let library = Loaded::without_functions();
        let cuda = Cuda { c: Functions::new(&library), library };
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
