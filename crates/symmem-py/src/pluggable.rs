//! The functions that `torch.cuda.memory.CUDAPluggableAllocator` loads: torch's pools with symmetric segments.
//!
//! Torch calls these from any thread, with or without the GIL, so nothing here uses Python. A segment is an ordinary allocation. It
//! is freed when torch has freed it and nothing else uses it.
#![allow(unsafe_code)] // exported names, which nothing else in a process has; S4 (torch never destroys its streams)

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use symmem::cuda::Stream;

use crate::group::Group;
use crate::life::Life;
use crate::memory::{Allocation, Buffer, open};

/// The names that torch is given.
const NAMES: (&str, &str) = ("symmem_pool_alloc", "symmem_pool_free");

/// Whose memory the segments are.
struct Home {
    group: symmem::Group,
    pad_bytes: usize,
    backend: String,
    _life: Arc<Life>,
}

struct Pools {
    home: Option<Home>,
    /// The segments that torch has, by address.
    segments: BTreeMap<usize, Arc<Allocation>>,
}

static POOLS: Mutex<Pools> = Mutex::new(Pools { home: None, segments: BTreeMap::new() });

fn pools() -> MutexGuard<'static, Pools> {
    // Nothing is done under the lock that could leave the tables half changed.
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the world, backend and signal pad size of later segments of torch's pools. Returns the names of the functions that this
/// library exports for `CUDAPluggableAllocator`.
#[pyfunction]
#[pyo3(signature = (group, pad_bytes, backend = String::from("cuda")))]
pub(crate) fn serve_pools(
    group: &Bound<'_, Group>,
    pad_bytes: usize,
    backend: String,
) -> (&'static str, &'static str) {
    let group = group.get();
    let (inner, _life) = (group.inner.clone(), Arc::clone(&group.life));
    let home = Home { group: inner, pad_bytes, backend, _life };
    let had = pools().home.replace(home);
    drop(had); // not under the lock: this may leave a world
    NAMES
}

/// Allocates a segment of `size` bytes on a device, or returns null. The reason goes to standard error: torch reports "out of memory".
#[unsafe(no_mangle)]
extern "C" fn symmem_pool_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    match segment(size, device, stream as usize) {
        Ok(address) => address as *mut c_void,
        Err(e) => {
            let _ = writeln!(
                std::io::stderr(),
                "symmem: {size} bytes for a pool of cuda:{device}: {e}"
            );
            std::ptr::null_mut()
        }
    }
}

/// Frees a segment. Waits for work in torch's streams, as `cudaFree` does.
#[unsafe(no_mangle)]
extern "C" fn symmem_pool_free(
    address: *mut c_void,
    _size: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    let gone = pools().segments.remove(&(address as usize));
    // Not under our lock, because it may wait. Torch's lock is held, and a thread that waits for that may hold the GIL.
    if let Some(segment) = gone.and_then(Arc::into_inner) {
        segment.end();
    }
}

fn segment(size: isize, device: c_int, stream: usize) -> symmem::Result<usize> {
    let home = pools().home.as_ref().map(|h| (h.group.clone(), h.pad_bytes, h.backend.clone()));
    let unavailable = |why: &str| symmem::Error::unavailable("a pool of symmetric memory", why);
    let (group, pad_bytes, backend) =
        home.ok_or_else(|| unavailable("symmem.torch.install(\"cuda\") was not called"))?;
    let (Ok(bytes), Ok(number)) = (usize::try_from(size), u32::try_from(device)) else {
        return Err(unavailable("the size or the device is negative"));
    };
    let gpu = open(number, Some(&backend), &group)?;
    // SAFETY: S4: torch's current stream, in the primary context, alive during this call. The library then sees whether it is
    // being captured.
    let stream = unsafe { Stream::from_raw(&gpu, stream) };
    let buffer = gpu.alloc_with_pad(&group, bytes.max(1), pad_bytes)?;
    drop(stream);
    let made = Allocation::new(Buffer::Cuda(buffer));
    let address = made.address;
    pools().segments.insert(address, made);
    Ok(address)
}
