//! Calls of the driver that fail halfway: which rank is told what, that nothing is left, and that the next attempt works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use symmem::cuda::{Gpu, Stream};
use symmem::{Error, ReduceOp, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::Fake;

use super::{drivers, on};

/// What allocating, forming a group and launching call.
const CALLS: [&str; 19] = [
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuStreamCreate",
    "cuMemsetD8Async",
    "cuStreamSynchronize",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemHostAlloc",
    "cuEventCreate",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamGetCaptureInfo",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuLaunchKernel",
];
/// What giving something back needs too: where it fails then, something is lost.
const CONTEXTS: [&str; 3] = ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"];

enum Attempt {
    Done,
    Failed(Error),
    /// The peer could not do what it does alone.
    Alone,
}

/// Does something of everything. What a rank does alone comes first, and all know whether all could.
fn attempt(world: &World, gpu: &Gpu) -> Attempt {
    let alone = || Ok((gpu.stream()?, gpu.stream()?, gpu.alloc::<u32>(world, 100)?));
    let alone: Result<_, Error> = alone();
    let mut ready = vec![0; world.size()];
    world.all_gather(&[u32::from(alone.is_ok())], &mut ready).unwrap();
    let (a, b, buffer) = match alone {
        Ok(alone) if !ready.contains(&0) => alone,
        Ok(_) => return Attempt::Alone,
        Err(e) => return Attempt::Failed(e),
    };
    let together = || {
        let mut x = buffer.rendezvous(world)?;
        x.barrier(&a)?;
        x.all_reduce(ReduceOp::Sum, &b)?;
        x.synchronize(&b)
    };
    together().map_or_else(Attempt::Failed, |()| Attempt::Done)
}

/// Has the `nth` call fail on rank 1; gives back whether there were so many, and what is left.
fn with_failure(call: &str, nth: usize) -> (bool, Vec<String>) {
    let drivers: Vec<Arc<Fake>> = drivers(2);
    let reached = AtomicBool::new(false);
    let body = |world: &World, driver: &Arc<Fake>, gpu: &Gpu, _: &Stream| {
        let before = driver.calls(call);
        if world.rank() == 1 {
            driver.fail(call, nth, code::OUT_OF_MEMORY);
        }
        check(call, world.rank(), attempt(world, gpu));
        if world.rank() == 1 {
            reached.store(driver.calls(call) - before >= nth, Ordering::Relaxed);
        }
        world.barrier().unwrap();
        let again = attempt(world, gpu);
        let done = matches!(again, Attempt::Done) || !reached.load(Ordering::Relaxed);
        assert!(done, "{call} {nth}: rank {}", world.rank());
    };
    on(&drivers, |rank| rank, body);
    let left = drivers.iter().flat_map(|driver| driver.live()).collect();
    (reached.into_inner(), left)
}

/// Who failed says which call did; who did not is told, unless the other was alone.
fn check(call: &str, rank: usize, attempt: Attempt) {
    match (rank, attempt) {
        (_, Attempt::Done) | (0, Attempt::Alone) => {}
        (0, Attempt::Failed(Error::PeerFailed { rank: 1, reason, .. })) => {
            assert!(reason.contains(call), "{call}: {reason}");
        }
        (1, Attempt::Failed(Error::Driver { call: failed, why, .. })) => {
            assert_eq!(failed, call);
            let expected = format!("{call} failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
            assert!(why.starts_with(&expected), "{why}");
        }
        (rank, Attempt::Failed(e)) => panic!("{call}: rank {rank}: {e:?}"),
        (rank, Attempt::Alone) => panic!("{call}: rank {rank} is alone"),
    }
}

#[test]
fn a_call_that_fails_is_named_on_all_ranks_and_leaves_nothing() {
    for call in CALLS {
        let mut nth = 1;
        loop {
            let (reached, left) = with_failure(call, nth);
            assert_eq!(left, [""; 0], "{call} {nth}");
            assert!(reached || nth > 1, "{call} is never called");
            if !reached {
                break;
            }
            nth += 1;
        }
    }
}

#[test]
fn a_context_that_cannot_be_made_current_is_named_on_all_ranks() {
    for call in CONTEXTS {
        for nth in 1..=30 {
            with_failure(call, nth);
        }
    }
}

#[test]
fn a_device_that_cannot_be_opened_leaves_nothing() {
    for call in [
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGetUuid",
        "cuDevicePrimaryCtxRetain",
    ] {
        let driver = Fake::plain(1);
        driver.fail(call, if call == "cuDeviceGetAttribute" { 3 } else { 1 }, code::UNKNOWN);
        let e = Gpu::with_driver(driver.clone(), 0).unwrap_err();
        assert!(e.to_string().contains(call), "{e}");
        assert_eq!(driver.live(), [""; 0]);
        Gpu::with_driver(driver, 0).unwrap();
    }
}
