//! What memory of every backend must do, on the fake library's heap, with kernels that are functions.

use std::time::Duration;

use symmem::World;
use symmem::cuda::{Gpu, Stream};
use symmem_testing::kernels;

use super::{open, ranks};

fn on_the_heap(test: &'static str, n: usize, body: impl Fn(&World, &Gpu, &Stream)) {
    ranks(n).run(test, |world| {
        world.set_timeout(Duration::from_secs(30));
        let (driver, gpu, stream) = open(&world);
        kernels::install(&driver);
        body(&world, &gpu, &stream);
        world.barrier().unwrap();
    });
}

symmem_testing::every_backend!(device: on_the_heap);
