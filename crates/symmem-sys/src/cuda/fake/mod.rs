//! A CUDA driver in plain Rust, for tests on machines without a GPU.
