//! What memory of every backend must do, on a real device.

symmem_testing::every_backend!(device: crate::each_of, #[ignore = "needs a CUDA device: cargo xtask gpu"]);
