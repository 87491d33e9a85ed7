//! What memory of every backend must do, on a real device.

symmem_testing::everywhere!(device: crate::each_of, #[ignore = "needs a CUDA device: cargo xtask gpu"]);
