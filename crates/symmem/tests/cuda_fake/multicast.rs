//! Multicast: all ranks have it, or none.

use std::sync::{Arc, Mutex};

use symmem::cuda::{DeviceHandle, Gpu, Stream};
use symmem::{DType, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_testing::{Ranks, test_name};

use super::{configured, drivers, on, ranks};

pub(super) fn able() -> Config {
    Config { multicast: true, ..Config::default() }
}

/// What kernels see of it: `SymmemHandle::multicast`, whose place a test of the layout holds.
fn seen_by_kernels(handle: &DeviceHandle) -> u64 {
    let field = std::ptr::from_ref(handle).cast::<u8>().wrapping_add(1192).cast::<u64>();
    // SAFETY: eight bytes of the structure, aligned, as kernels read them.
    unsafe { field.read() }
}

/// Allocates, and gives back whether there is multicast.
pub(super) fn has_multicast(world: &World, gpu: &Gpu) -> bool {
    let x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
    let (handle, seen) = (x.handle(), seen_by_kernels(&x.device_handle()));
    assert_eq!(handle.multicast_ptr().unwrap_or(0) as u64, seen);
    let Some(address) = handle.multicast_ptr() else { return false };
    assert!(address.is_multiple_of(2 << 20), "{address:#x}");
    assert!(!handle.buffer_ptrs().contains(&address));
    let own = handle.buffer_ptrs()[world.rank()];
    let later = world.rendezvous_at(own + 16, DType::F32).unwrap().unwrap();
    assert_eq!(later.multicast_ptr(), Some(address + 16), "the offset applies");
    true
}

/// What `body` logs in this thread.
pub(super) fn logged<R>(body: impl FnOnce() -> R) -> (R, String) {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber: tracing::Dispatch = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish()
        .into();
    let result = tracing::dispatcher::with_default(&subscriber, body);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    (result, text)
}

#[test]
fn ranks_on_able_devices_have_an_address_for_all() {
    for n in [2, 4] {
        let drivers = configured(n, &vec![able(); n]);
        ranks(&drivers, |world, driver, gpu, _| {
            assert!(has_multicast(world, gpu));
            assert!(has_multicast(world, gpu));
            assert_eq!(driver.calls("cuMulticastBindMem"), 2);
            assert_eq!(driver.calls("cuMulticastUnbind"), 2);
            assert_eq!(driver.calls("cuMulticastAddDevice"), 2);
            let made = if world.rank() == 0 { 2 } else { 0 };
            assert_eq!(driver.calls("cuMulticastCreate"), made);
        });
    }
}

#[test]
fn processes_have_an_address_for_all() {
    Ranks::new(2).run(test_name!(), |world| {
        let driver = Fake::new(vec![able(); 2]);
        let gpu = Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap();
        assert!(has_multicast(&world, &gpu));
        drop((gpu, world));
        assert_eq!(driver.live(), [""; 0]);
    });
}

/// Every call of the driver that setting up makes, after how many of the rendezvous itself.
#[test]
fn a_step_that_fails_on_one_rank_leaves_all_without() {
    for (call, nth, victims) in [
        ("cuMulticastCreate", 1, &[0][..]),
        ("cuMemExportToShareableHandle", 3, &[0]),
        ("cuMemImportFromShareableHandle", 3, &[0, 1, 2]),
        ("cuMulticastAddDevice", 1, &[0, 1, 2]),
        ("cuMemRetainAllocationHandle", 1, &[0, 1, 2]),
        ("cuMulticastBindMem", 1, &[0, 1, 2]),
        ("cuMemGetAllocationGranularity", 3, &[0, 1, 2]),
        ("cuMemGetAllocationGranularity", 4, &[0]),
        ("cuMemAddressReserve", 3, &[0, 1, 2]),
        ("cuMemMap", 3, &[0, 1, 2]),
        ("cuMemSetAccess", 3, &[0, 1, 2]),
    ] {
        for victim in victims {
            fails_for_all(call, nth, *victim);
        }
    }
}

fn fails_for_all(call: &str, nth: usize, victim: usize) {
    let drivers = configured(3, &vec![able(); 3]);
    ranks(&drivers, |world, driver, gpu, _: &Stream| {
        assert!(has_multicast(world, gpu));
        let buffer = gpu.alloc::<f32>(world, 100).unwrap();
        if world.rank() == victim {
            driver.fail(call, nth, code::NOT_PERMITTED);
        }
        let (x, log) = logged(|| buffer.rendezvous(world).unwrap());
        assert_eq!(x.handle().multicast_ptr(), None, "{call} {nth} on {victim}");
        assert_eq!(seen_by_kernels(&x.device_handle()), 0);
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains(&format!("rank {victim} could not set it up: {call}")), "{log}");
        drop(x);
        assert!(has_multicast(world, gpu), "{call} {nth} on {victim}: the next one");
    });
}

#[test]
fn one_device_that_cannot_leaves_all_without() {
    let drivers = configured(2, &[able(), Config::default()]);
    ranks(&drivers, |world, driver, gpu, _| {
        let (has, log) = logged(|| has_multicast(world, gpu) || has_multicast(world, gpu));
        assert!(!has);
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains("the device of rank 1 cannot"), "{log}");
        assert_eq!(driver.calls("cuMulticastCreate") + driver.calls("cuMulticastAddDevice"), 0);
    });
}

#[test]
fn ranks_that_share_a_device_or_are_alone_do_without() {
    let without = |world: &World, driver: &Arc<Fake>, gpu: &Gpu, _: &Stream| {
        let (has, log) = logged(|| has_multicast(world, gpu));
        assert_eq!((has, log.as_str()), (false, ""));
        assert_eq!(driver.calls("cuMulticastCreate"), 0);
    };
    on(&configured(2, &[able()]), |_| 0, without);
    on(&configured(1, &[able()]), |_| 0, without);
    on(&drivers(2), |rank| rank, without);
}
