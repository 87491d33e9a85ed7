//! What the host does for memory of devices, against a driver in plain Rust: no device is needed, and no kernel runs but
//! as a function of the test's.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

mod cuda_fake {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use symmem::World;
    use symmem::cuda::{Gpu, Stream};
    use symmem_sys::cuda::fake::{Config, Fake, Launched};
    use symmem_testing::kernels::declared;

    mod capture;
    mod copy_engine;
    mod every_backend;
    mod fabric;
    mod failing;
    mod failures;
    mod hosts;
    mod launching;
    mod mailbox;
    mod memory;
    mod moving;
    mod multicast;
    mod multimem;
    mod occupancy;
    mod placement;
    mod pools;
    mod ptx;
    mod replays;
    mod rows;
    mod signals;
    mod tiles;
    mod values;
    mod words;

    /// Bytes of what a kernel gets about its group.
    const GROUP: usize = 616;

    /// A driver for each of `n` ranks, which all see `n` devices, as processes of one machine do.
    fn drivers(n: usize) -> Vec<Arc<Fake>> {
        configured(n, &vec![Config::default(); n])
    }

    fn configured(n: usize, devices: &[Config]) -> Vec<Arc<Fake>> {
        (0..n).map(|_| Fake::new(devices.to_vec())).collect()
    }

    /// Runs ranks as threads, each on the device of its number and with a driver of its own, of which nothing may be left.
    fn ranks(drivers: &[Arc<Fake>], body: impl Fn(&World, &Arc<Fake>, &Gpu, &Stream) + Sync) {
        on(drivers, |rank| rank, body);
        for (rank, driver) in drivers.iter().enumerate() {
            assert_eq!(driver.live(), [""; 0], "left by rank {rank}");
        }
    }

    /// Likewise, on devices of the test's choice, and whatever is left.
    fn on(
        drivers: &[Arc<Fake>],
        device: impl Fn(usize) -> usize + Sync,
        body: impl Fn(&World, &Arc<Fake>, &Gpu, &Stream) + Sync,
    ) {
        World::threads(drivers.len(), |world| {
            let driver = &drivers[world.rank()];
            let number = device(world.rank()) as u32;
            let gpu = Gpu::with_driver(driver.clone(), number).unwrap();
            let stream = gpu.stream().unwrap();
            body(&world, driver, &gpu, &stream);
            world.barrier().unwrap();
        })
        .unwrap();
    }

    /// A word of "device" or pinned memory.
    fn word<'a>(address: u64) -> &'a AtomicU32 {
        // SAFETY: the fake driver's addresses are those of this process; tests ask for words that are mapped.
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
    }

    /// The bytes of all ranks at a handle's addresses, as words.
    fn first_words(handle: &symmem::Handle) -> Vec<u32> {
        handle.buffer_ptrs().into_iter().map(|address| load(address as u64)).collect()
    }

    fn load(address: u64) -> u32 {
        word(address).load(Ordering::Acquire)
    }

    /// What a kernel got about its group.
    struct Group(Vec<u8>);

    impl Group {
        fn of(launched: &Launched) -> Self {
            Self(launched.parameters[0].clone())
        }

        fn u32(&self, at: usize) -> u32 {
            u32::from_ne_bytes(self.0[at..at + 4].try_into().unwrap())
        }

        fn u64(&self, at: usize) -> u64 {
            u64::from_ne_bytes(self.0[at..at + 8].try_into().unwrap())
        }

        fn rank(&self) -> usize {
            self.u32(0) as usize
        }

        fn size(&self) -> usize {
            self.u32(4) as usize
        }

        fn mailbox(&self) -> u64 {
            self.u64(32)
        }

        fn pad(&self, rank: usize) -> u64 {
            self.u64(40 + 8 * rank)
        }
    }
}
