//! What `torch.cuda.memory.CUDAPluggableAllocator` loads from this library: pools of torch whose segments are symmetric.
//!
//! Torch calls these from any thread, with or without Python's lock, so nothing here touches Python. A segment is an
//! allocation like any other, found by its address, until torch gives it back and nobody else uses it.
#![allow(unsafe_code)] // exported names, which nothing else in a process has; S4 (torch's streams live for ever)

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use symmem::cuda::Stream;

use crate::group::{Group, Life};
use crate::memory::{Allocation, Buffer, Place, open};

/// The names that torch is given.
const NAMES: (&str, &str) = ("symmem_pool_alloc", "symmem_pool_free");

/// Whose memory the segments are.
struct Home {
    group: symmem::Group,
    pad_bytes: usize,
    source: String,
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

/// Has segments of torch's pools be memory of `group`'s world from `source`, with signal pads of `pad_bytes`, from now on. The
/// names of the functions that this library exports for `CUDAPluggableAllocator`.
#[pyfunction]
#[pyo3(signature = (group, pad_bytes, source = String::from("cuda")))]
pub(crate) fn serve_pools(
    group: &Bound<'_, Group>,
    pad_bytes: usize,
    source: String,
) -> (&'static str, &'static str) {
    let group = group.get();
    let (inner, _life) = (group.inner.clone(), Arc::clone(&group.life));
    let home = Home { group: inner, pad_bytes, source, _life };
    let had = pools().home.replace(home);
    drop(had); // not under the lock: a world may end here
    NAMES
}

/// A segment of `size` bytes on a device, or null; the reason goes to standard error, for torch says "out of memory".
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

/// Takes a segment back. What was put into torch's streams before is waited for, as torch has it of `cudaFree`.
#[unsafe(no_mangle)]
extern "C" fn symmem_pool_free(
    address: *mut c_void,
    _size: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    let gone = pools().segments.remove(&(address as usize));
    // Not under our lock, for it may take a while, but under torch's: whoever waits for that may have the interpreter's.
    if let Some(segment) = gone.and_then(Arc::into_inner) {
        segment.end();
    }
}

fn segment(size: isize, device: c_int, stream: usize) -> symmem::Result<usize> {
    let home = pools().home.as_ref().map(|h| (h.group.clone(), h.pad_bytes, h.source.clone()));
    let unavailable = |why: &str| symmem::Error::unavailable("a pool of symmetric memory", why);
    let (group, pad_bytes, source) =
        home.ok_or_else(|| unavailable("symmem.torch.install(\"cuda\") was not called"))?;
    let (Ok(bytes), Ok(number)) = (usize::try_from(size), u32::try_from(device)) else {
        return Err(unavailable("a size and a device are not negative"));
    };
    let gpu = open(number, Some(&source), &group)?;
    // SAFETY: S4: torch's current stream, in the primary context, and alive for the time of this call. Known to the library,
    // it is seen whether it is being captured.
    let stream = unsafe { Stream::from_raw(&gpu, stream) };
    let buffer = gpu.alloc_with_pad(&group, bytes.max(1), pad_bytes)?;
    drop(stream);
    let made = Allocation::new(Place::Cuda(number), Buffer::Cuda(buffer));
    let address = made.address;
    pools().segments.insert(address, made);
    Ok(address)
}
