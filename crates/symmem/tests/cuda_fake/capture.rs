//! What is refused while a graph is captured, and that refusing it leaves the capture as it was.

use symmem::cuda::{Buffer, Gpu, Stream};
use symmem::{DType, Error, Pool, Result, World};
use symmem_sys::cuda::{Devices, Streams};

use super::{drivers, ranks};

const LEN: usize = 100;

fn refused<T>(result: Result<T>, op: &'static str) {
    match result.map(drop) {
        Err(e @ Error::Usage { .. }) => {
            let text = e.to_string();
            assert!(text.starts_with("rank "), "{text}");
            assert!(text.contains(op) && text.contains("capturing a graph"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

/// All that allocates or maps.
fn try_all(world: &World, gpu: &Gpu, pool: &Pool<Gpu>, buffer: Option<Buffer<u32>>) {
    refused(gpu.alloc::<u32>(world, LEN), "alloc");
    refused(gpu.alloc_persistent::<u32>(world, 9, LEN), "alloc");
    refused(pool.alloc::<u32>(LEN), "alloc");
    let buffer = buffer.unwrap();
    refused(world.rendezvous_at(buffer.address() as usize, DType::U32), "rendezvous");
    refused(buffer.rendezvous(world), "rendezvous");
}

#[test]
fn memory_is_refused_while_a_graph_is_captured_and_the_capture_goes_on() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let pool = gpu.pool(world, 2 << 20);
        let mut buffers = vec![gpu.alloc(world, LEN).unwrap(), gpu.alloc(world, LEN).unwrap()];
        let graph = stream.capture(|| {
            try_all(world, gpu, &pool, buffers.pop()); // before the group has anything on the device
            Ok(())
        });
        graph.unwrap();
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let kept = gpu.alloc_persistent::<u32>(world, 1, LEN).unwrap().rendezvous(world).unwrap();
        drop(kept);
        let graph = stream.capture(|| {
            try_all(world, gpu, &pool, buffers.pop());
            // What is known needs nothing of the device.
            let kept = gpu.alloc_persistent::<u32>(world, 1, LEN)?.rendezvous(world)?;
            kept.barrier(stream)?;
            x.barrier(stream)
        });
        let graph = graph.unwrap();
        assert_eq!(driver.launches().len(), 0);
        // SAFETY: the memory of the group's pads lives, and all ranks launch theirs.
        unsafe { graph.launch(stream) }.unwrap();
        assert_eq!(driver.launches().len(), 2);
        gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
    });
}

/// Waiting for what is only noted, or for anything else meanwhile.
#[test]
fn nothing_is_waited_for_in_a_capture_which_goes_on() {
    let waits = |result: Result<()>| match result {
        Err(e @ Error::Usage { .. }) => assert!(e.to_string().contains("capturing a graph"), "{e}"),
        other => panic!("{other:?}"),
    };
    ranks(&drivers(2), |world, _, gpu, stream| {
        let other = gpu.stream().unwrap();
        let mut x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let graph = stream.capture(|| {
            for stream in [stream, &other] {
                waits(x.write(&[0; LEN], stream));
                waits(x.read(stream).map(drop));
                waits(x.synchronize(stream));
            }
            x.barrier(stream)
        });
        graph.unwrap();
        x.synchronize(stream).unwrap();
    });
}

#[test]
fn what_is_dropped_in_a_capture_does_not_end_it() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let pool = gpu.pool(world, 2 << 20);
        let other = gpu.stream().unwrap();
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let part = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        let unmapped = driver.calls("cuMemUnmap");
        let graph = stream.capture(|| {
            drop((buffer, part, other));
            x.barrier(stream)
        });
        graph.unwrap();
        assert!(driver.calls("cuMemUnmap") > unmapped);
        assert_eq!(pool.usage().1, 0);
    });
}

/// Who else captures, and in which way, is not known: so it is refused to all threads.
#[test]
fn memory_is_refused_while_somebody_elses_stream_is_captured() {
    ranks(&drivers(2), |world, driver, gpu, _| {
        let pool = gpu.pool(world, 2 << 20);
        let buffer = gpu.alloc(world, LEN).unwrap();
        let device = driver.device(world.rank()).unwrap();
        driver.context_push(driver.context_retain(device).unwrap()).unwrap();
        let theirs = driver.stream_create().unwrap();
        driver.context_pop().unwrap();
        // SAFETY: a stream of the device, which lives until the end of the test.
        let known = unsafe { Stream::from_raw(gpu, theirs.raw()) };
        driver.capture_begin(theirs).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| try_all(world, gpu, &pool, Some(buffer))).join().unwrap();
        });
        let graph = driver.capture_end(theirs).unwrap();
        gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        drop(known);
        // SAFETY: the test's own, and not used again.
        unsafe { driver.graph_destroy(graph) }.unwrap();
        // SAFETY: likewise.
        unsafe { driver.stream_destroy(theirs) }.unwrap();
        // SAFETY: likewise.
        unsafe { driver.context_release(device) }.unwrap();
    });
}

#[test]
fn other_threads_allocate_while_one_captures() {
    ranks(&drivers(1), |world, _, gpu, stream| {
        let graph = stream.capture(|| {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| gpu.alloc::<u32>(world, LEN).map(drop));
                other.join().unwrap()
            })
        });
        graph.unwrap();
    });
}
