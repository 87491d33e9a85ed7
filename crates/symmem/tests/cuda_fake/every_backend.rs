//! What memory of every backend must do, on devices of the fake driver whose kernels are functions.

use std::time::Duration;

use symmem::World;
use symmem::cuda::{Gpu, Stream};
use symmem_testing::kernels;

use super::{drivers, ranks};

fn with_kernels(_: &str, n: usize, body: impl Fn(&World, &Gpu, &Stream) + Sync) {
    let drivers = drivers(n);
    drivers.iter().for_each(|driver| kernels::install(driver));
    ranks(&drivers, |world, _, gpu, stream| {
        world.set_timeout(Duration::from_secs(30));
        body(world, gpu, stream);
    });
}

symmem_testing::every_backend!(device: with_kernels);
