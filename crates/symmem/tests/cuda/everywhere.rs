//! What memory of every backend must do, on a real device.

use symmem_testing::conformance::everywhere::{self as checks, OnDevice};
use symmem_testing::{everywhere, test_name};

use crate::each;

macro_rules! conforms {
    ($($name:ident($ranks:expr);)*) => {$(
        #[test]
        #[ignore = "needs a CUDA device: cargo xtask gpu"]
        fn $name() {
            each(test_name!(), |world, gpu, stream| {
                checks::$name(&OnDevice::new(world, gpu, stream));
            });
        }
    )*};
}

everywhere!(conforms);
