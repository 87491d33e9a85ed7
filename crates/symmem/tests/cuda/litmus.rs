//! What orders memory between ranks on a device, with plain stores and loads in between: nothing may arrive out of order.
//!
//! All ranks share the device here, where the forms for one device and those for several are both right.

use symmem::cuda::{Buffer, Gpu, Kernel, Parameter, Stream, Symmetric};
use symmem::{Result, World};
use symmem_testing::test_name;

use crate::each;

const BLOCKS: u32 = 8;
const THREADS: u32 = 128;

/// Memory with a word for each thread of each rank, and where kernels count what was out of order.
fn memory(world: &World, gpu: &Gpu) -> (Symmetric<u32>, Buffer<u32>) {
    let words = (BLOCKS * THREADS) as usize * world.size();
    let x = gpu.alloc::<u32>(world, words).unwrap().rendezvous(world).unwrap();
    (x, gpu.alloc::<u32>(world, 1).unwrap())
}

/// The module of the litmus kernels.
fn ptx() -> String {
    let files = symmem::cuda::ptx_files().unwrap();
    files.into_iter().find(|(name, _)| name == "litmus").unwrap().1
}

fn launch(kernel: &Kernel, stream: &Stream, list: &[Parameter<'_>]) -> Result<()> {
    // SAFETY: the kernels' parameters in order; the memory lives until the stream is empty, and all ranks launch theirs.
    unsafe { kernel.launch([BLOCKS, 1, 1], [THREADS, 1, 1], stream, list) }
}

/// Processes that take turns on the device, without MPS, need milliseconds to wait for each other.
fn is_quick() -> bool {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some()
}

/// Runs a kernel that goes through many rounds by itself, at system and at device scope.
fn rounds(world: &World, gpu: &Gpu, stream: &Stream, name: &str) {
    let kernel = gpu.module(&ptx()).unwrap().kernel(name).unwrap();
    let (x, wrong) = memory(world, gpu);
    let rounds: u32 = if is_quick() { 20_000 } else { 50 };
    for scope in [0_u32, 1] {
        let (handle, at) = (x.device_handle(), wrong.address());
        let list = [(&handle).into(), (&scope).into(), (&rounds).into(), (&at).into()];
        launch(&kernel, stream, &list).unwrap();
        x.synchronize(stream).unwrap();
        assert_eq!(wrong.read(stream).unwrap(), [0], "{name}, {rounds} rounds, scope {scope}");
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn nothing_overtakes_the_flags_of_a_group() {
    each(test_name!(), |world, gpu, stream| rounds(world, gpu, stream, "litmus_blocks"));
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn nothing_overtakes_a_signal() {
    each(test_name!(), |world, gpu, stream| rounds(world, gpu, stream, "litmus_signals"));
}

/// Kernels that follow a barrier are there before it has ended, where the device can do that.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn nothing_overtakes_a_barrier_in_a_stream() {
    each(test_name!(), |world, gpu, stream| {
        let module = gpu.module(&ptx()).unwrap();
        let [write, check] =
            ["litmus_write", "litmus_check"].map(|name| module.kernel(name).unwrap());
        let (x, wrong) = memory(world, gpu);
        let (handle, at) = (x.device_handle(), wrong.address());
        let round = |value: u32| {
            launch(&write, stream, &[(&handle).into(), (&value).into()])?;
            x.barrier(stream)?;
            launch(&check, stream, &[(&handle).into(), (&value).into(), (&at).into()])?;
            x.barrier(stream)
        };
        (1..100).try_for_each(round).unwrap();
        x.synchronize(stream).unwrap();
        let graph = stream.capture(|| (100..150).try_for_each(round)).unwrap();
        for _ in 0..if is_quick() { 100 } else { 3 } {
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
        }
        x.synchronize(stream).unwrap();
        assert_eq!(wrong.read(stream).unwrap(), [0]);
    });
}
