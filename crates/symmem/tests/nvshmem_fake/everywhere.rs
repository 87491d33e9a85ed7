//! What memory of every backend must do, on the fake library's heap, with kernels that are functions.

use std::time::Duration;

use symmem_testing::conformance::everywhere::{self as checks, OnDevice};
use symmem_testing::{everywhere, kernels, test_name};

use super::{open, ranks};

macro_rules! conforms {
    ($($name:ident($ranks:expr);)*) => {$(
        #[test]
        fn $name() {
            ranks($ranks).run(test_name!(), |world| {
                world.set_timeout(Duration::from_secs(30));
                let (driver, gpu, stream) = open(&world);
                kernels::install(&driver);
                checks::$name(&OnDevice::new(&world, &gpu, &stream));
                world.barrier().unwrap();
            });
        }
    )*};
}

everywhere!(conforms);
