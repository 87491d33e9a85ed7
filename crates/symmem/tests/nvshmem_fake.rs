//! Memory of NVSHMEM's heap and what NVSHMEM does in streams, against a library in plain Rust and the fake driver: ranks are
//! processes, as for the real one, and no device is needed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

mod nvshmem_fake {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use symmem::World;
    use symmem::cuda::{Gpu, Stream};
    use symmem_fake_nvshmem::{BASE, HEAP, PES};
    use symmem_sys::cuda::fake::{Config, Fake};
    use symmem_sys::nvshmem::Nvshmem;
    use symmem_testing::Ranks;

    mod apart;
    mod choosing;
    mod every_backend;
    mod hosts;
    mod memory;
    mod ops;
    mod teams;

    /// The library, next to the test's own program.
    fn library() -> PathBuf {
        let own = std::env::current_exe().unwrap();
        let built = own.parent().unwrap().join("libsymmem_fake_nvshmem.so");
        assert!(built.is_file(), "{} was not built", built.display());
        built
    }

    /// `n` ranks that find the library.
    fn ranks<'a>(n: usize) -> Ranks<'a> {
        Ranks::new(n).env("SYMMEM_NVSHMEM", library().display())
    }

    /// A driver that knows of the heaps, with a device for each rank.
    fn driver(devices: usize, config: &Config) -> Arc<Fake> {
        let driver = Fake::new(vec![config.clone(); devices]);
        driver.adopt(BASE, (PES as u64 + 1) * HEAP);
        driver
    }

    /// This rank's device, with memory of NVSHMEM's heap.
    fn open(world: &World) -> (Arc<Fake>, Gpu, Stream) {
        let driver = driver(world.size(), &Config::default());
        let gpu = Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap();
        let gpu = gpu.with_backend(Some("nvshmem"), world).unwrap();
        let stream = gpu.stream().unwrap();
        (driver, gpu, stream)
    }

    /// How often the library's function was called, and how many allocations and teams this rank has.
    fn counts(function: &std::ffi::CStr) -> (i32, i32) {
        Nvshmem::open().unwrap().fake_counts(function).unwrap()
    }

    /// A word of "device" memory.
    fn load(address: usize) -> u32 {
        // SAFETY: the fakes' addresses are those of this process; tests ask for words that are mapped.
        let word =
            unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut::<u32>(address)) };
        word.load(Ordering::Acquire)
    }
}
