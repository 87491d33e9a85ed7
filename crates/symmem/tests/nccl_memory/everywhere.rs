//! What memory of every backend must do: of the fake library, with kernels that are functions, and of the real one.

use symmem_sys::cuda::fake::Fake;
use symmem_testing::conformance::everywhere::{self as checks, OnDevice};
use symmem_testing::{FakeNccl, everywhere, kernels, test_name};

use super::device::with_the_real_library;
use crate::on;

macro_rules! conforms {
    ($($name:ident($ranks:expr);)*) => {
        mod fake {
            use super::*;
            $(#[test]
            fn $name() {
                let (fake, driver) = (FakeNccl::new(), Fake::plain($ranks));
                kernels::install(&driver);
                on(&fake, &fake.nccl(), driver, $ranks, |world, gpu, stream| {
                    checks::$name(&OnDevice::new(world, gpu, stream));
                });
            })*
        }

        mod real {
            use super::*;
            $(#[test]
            #[ignore = "needs a CUDA device: cargo xtask gpu"]
            fn $name() {
                with_the_real_library(test_name!(), &[], |world, gpu, stream| {
                    checks::$name(&OnDevice::new(world, gpu, stream));
                });
            })*
        }
    };
}

everywhere!(conforms);
