//! A kernel of one's own that stores into its neighbour's memory and signals: CUDA C++, compiled here and now by NVRTC.
//!
//! Every rank gives its numbers to the next, and adds to its own what came from the one before.
//!
//! Alone, or as ranks: `cargo run --release -- run -n 4 -- target/release/examples/08_custom_kernel`. Ranks may share a
//! device. Without a device or without NVRTC it says so; `SYMMEM_NVRTC` may have the path of the latter.

use symmem::cuda::{Gpu, HEADER, Module};
use symmem::{Error, Result, World};
use symmem_sys::nvrtc;

/// Numbers of a rank; as many come in after them.
const LEN: u32 = 10_000;

const SOURCE: &str = r#"
#include "symmem.cuh"

// One block. The first `length` numbers of a rank are its own; the others are written by the rank before it.
extern "C" __global__ void pass_on(const __grid_constant__ SymmemHandle handle, symmem_u32 length) {
    symmem_u32 next = (handle.rank + 1) % handle.size;
    symmem_u32 previous = (handle.rank + handle.size - 1) % handle.size;
    float *mine = symmem_peer<float>(handle, handle.rank);
    float *theirs = symmem_peer<float>(handle, next) + length;
    for (symmem_u32 i = threadIdx.x; i < length; i += blockDim.x) {
        theirs[i] = mine[i];
    }
    __syncthreads(); // all threads have stored
    bool good = true;
    if (threadIdx.x == 0) {
        // Release: what the block has stored is seen by who takes the signal. Acquire: and the other way round.
        good = symmem_put_signal(handle, next, 0) && symmem_wait_signal(handle, previous, 0);
    }
    if (!__syncthreads_and(good)) {
        return; // why lies in the mailbox, and the host gets it as an error
    }
    for (symmem_u32 i = threadIdx.x; i < length; i += blockDim.x) {
        mine[i] += mine[length + i];
    }
}
"#;

/// The device of this rank: its own, else the first, which ranks then share.
fn device(world: &World) -> Result<Gpu> {
    Gpu::open(world.local_rank() as u32).or_else(|_| Gpu::open(0))
}

fn compile(gpu: &Gpu) -> Result<Module> {
    let options = ["-std=c++17", "--gpu-architecture=compute_80"];
    let ptx = nvrtc::compile(SOURCE, "pass_on.cu", &options, &[("symmem.cuh", HEADER)]);
    let ptx = ptx.map_err(|failure| Error::unavailable("the kernel", failure.to_string()))?;
    gpu.module(&ptx)
}

fn main() -> Result<()> {
    let world = World::from_env()?;
    let (rank, n) = (world.rank(), world.size());
    let (gpu, module) = match device(&world).and_then(|gpu| Ok((gpu.clone(), compile(&gpu)?))) {
        Ok(found) => found,
        Err(why) => {
            println!("rank {rank} of {n}: not run: {why}");
            return Ok(());
        }
    };
    let value = |rank: usize, i: u32| (rank * 1000) as f32 + (i % 100) as f32;

    let stream = gpu.stream()?;
    let mut x = gpu.alloc::<f32>(&world, 2 * LEN as usize)?.rendezvous(&world)?;
    let own = (0..LEN).map(|i| value(rank, i));
    x.write(&own.chain(vec![0.0; LEN as usize]).collect::<Vec<_>>(), &stream)?;
    x.barrier(&stream)?; // nobody stores into a neighbour that is still writing zeros there

    let handle = x.device_handle();
    let kernel = module.kernel("pass_on")?;
    // SAFETY: the kernel's parameters. It writes the first half of our part, and the second half of our neighbour's, which
    // nobody else writes and the neighbour reads after our signal; `x` lives until the stream is empty.
    unsafe { kernel.launch([1, 1, 1], [256, 1, 1], &stream, &[(&handle).into(), (&LEN).into()]) }?;

    let sums = x.read(&stream)?; // waits for the stream; a kernel that gave up is an error here
    let before = (rank + n - 1) % n;
    let right = (0..LEN).zip(&sums).all(|(i, sum)| *sum == value(rank, i) + value(before, i));
    assert!(right, "rank {rank} has other sums than expected");
    println!("rank {rank} of {n}: {LEN} sums with what came from rank {before}, on {gpu:?}");
    world.barrier() // a neighbour may be at work on our part
}
