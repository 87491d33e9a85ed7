//! C libraries that are looked for when the program runs, so that one build works on every Linux machine.
//!
//! This is the only crate that calls foreign functions. A library that is not there is a [`Missing`],
//! never a panic, and a function that a library lacks is an error of the call.
//!
//! - [`cuda`]: the CUDA driver as a trait, the real one, and a fake one for tests (feature `fake`).
//! - [`nvml`]: what NVIDIA's management library knows of links between devices.
//! - [`nccl`]: NVIDIA's collectives: communicators, windows and signals.
//! - [`nvrtc`]: NVIDIA's compiler of kernels at run time.
//! - [`nvshmem`]: NVIDIA's OpenSHMEM, the host library.
//! - [`ucx`]: active messages of UCX, between hosts: a trait, the real engine, and a fake one for tests (feature `fake`).
#![deny(unsafe_code)]

mod library;
mod table;

pub mod cuda;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod nvshmem;
pub mod ucx;

pub use library::{Found, Library, Loaded, Missing, load, load_file, look_in, probe};
