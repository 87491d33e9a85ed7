//! What memory of every backend must do: of the fake library, with kernels that are functions, and of the real one.

use symmem::World;
use symmem::cuda::{Gpu, Stream};
use symmem_sys::cuda::fake::Fake;
use symmem_testing::{FakeNccl, kernels};

use super::device::with_the_real_library;
use crate::on;

fn with_kernels(_: &str, n: usize, body: impl Fn(&World, &Gpu, &Stream) + Sync) {
    let (fake, driver) = (FakeNccl::new(), Fake::plain(n));
    kernels::install(&driver);
    on(&fake, &fake.nccl(), driver, n, body);
}

fn on_a_device(test: &'static str, _: usize, body: impl Fn(&World, &Gpu, &Stream)) {
    with_the_real_library(test, &[], body);
}

mod fake {
    symmem_testing::every_backend!(device: super::with_kernels);
}

mod real {
    symmem_testing::every_backend!(device: super::on_a_device, #[ignore = "needs a CUDA device: cargo xtask gpu"]);
}
