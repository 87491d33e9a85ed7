//! Communicators against a library that stands in for NCCL: ranks are threads, and no device is needed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests, and what they share")]

mod nccl_fake {
    mod calling;
    mod failing;
    mod forming;

    use std::sync::Arc;
    use std::time::Duration;

    use symmem::World;
    use symmem::cuda::{Buffer, Gpu, Stream};
    use symmem::nccl::{Communicator, Nccl};
    use symmem::{Group, Number};
    use symmem_sys::cuda::fake::{Config, Fake};
    use symmem_testing::{FakeNccl, Live};

    /// Longer than anything here takes, unless it fails.
    const LONG: Duration = Duration::from_secs(30);
    /// What is waited for in vain.
    const SHORT: Duration = Duration::from_millis(150);

    /// One rank of a test.
    struct Rank<'a> {
        world: &'a World,
        gpu: Gpu,
        stream: Stream,
        nccl: Nccl,
        communicator: Communicator,
    }

    impl Rank<'_> {
        fn number(&self) -> usize {
            self.communicator.rank()
        }

        fn buffer<T: Number>(&self, data: &[T]) -> Buffer<T> {
            buffer(self.world, &self.gpu, &self.stream, data)
        }
    }

    fn buffer<T: Number>(group: &Group, gpu: &Gpu, stream: &Stream, data: &[T]) -> Buffer<T> {
        let mut buffer = gpu.alloc::<T>(group, data.len()).unwrap();
        buffer.write(data, stream).unwrap();
        buffer
    }

    /// A world of this thread alone.
    fn alone() -> World {
        World::threads(1, |world| world.clone()).unwrap().remove(0)
    }

    fn gpu(number: usize, of: usize) -> Gpu {
        let driver = Fake::new(vec![Config::default(); of]);
        Gpu::with_driver(driver, number as u32).unwrap()
    }

    /// Runs ranks as threads, each with a device and an end of one communicator, of which nothing may be left.
    fn ranks(fake: &FakeNccl, n: usize, body: impl Fn(&Rank<'_>) + Sync) {
        let nccl = fake.nccl();
        World::threads(n, |world| {
            world.set_timeout(LONG);
            let gpu = gpu(world.rank(), n);
            let communicator = nccl.of_group(&world, &gpu).unwrap();
            let (stream, nccl) = (gpu.stream().unwrap(), nccl.clone());
            let rank = Rank { world: &world, gpu, stream, nccl, communicator };
            body(&rank);
            world.barrier().unwrap();
        })
        .unwrap();
        assert_eq!(fake.live(), Live::default(), "something is left");
    }

    /// One thread with several devices, and an end for each.
    fn devices(fake: &FakeNccl, n: usize) -> (Nccl, Vec<Gpu>, Vec<Stream>, Vec<Communicator>) {
        let driver = Fake::new(vec![Config::default(); n]);
        let gpu = |number| Gpu::with_driver(Arc::clone(&driver) as _, number).unwrap();
        let gpus: Vec<Gpu> = (0..n as u32).map(gpu).collect();
        let streams = gpus.iter().map(|gpu| gpu.stream().unwrap()).collect();
        let nccl = fake.nccl();
        let communicators = nccl.of_devices(&gpus, LONG).unwrap();
        (nccl, gpus, streams, communicators)
    }
}
