//! What memory of every backend must do, on devices of the fake driver whose kernels are functions.

use std::time::Duration;

use symmem_testing::conformance::everywhere::{self as checks, OnDevice};
use symmem_testing::{everywhere, kernels};

use super::{drivers, ranks};

macro_rules! conforms {
    ($($name:ident($ranks:expr);)*) => {$(
        #[test]
        fn $name() {
            let drivers = drivers($ranks);
            drivers.iter().for_each(|driver| kernels::install(driver));
            ranks(&drivers, |world, _, gpu, stream| {
                world.set_timeout(Duration::from_secs(30));
                checks::$name(&OnDevice::new(world, gpu, stream));
            });
        }
    )*};
}

everywhere!(conforms);
