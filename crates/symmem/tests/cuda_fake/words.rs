//! Fills and writes of 32-bit words in a stream, refused as PyTorch refuses them.

use super::{drivers, ranks};

#[test]
fn words_of_any_rank_are_filled_up_to_the_bounds() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let peer = 1 - world.rank();
        let mut x = gpu.alloc::<u32>(world, 64).unwrap().rendezvous(world).unwrap();
        x.memset32(peer, 32, 42, 16, stream).unwrap();
        world.barrier().unwrap();
        let words = x.read(stream).unwrap();
        assert!(words.iter().enumerate().all(|(i, w)| *w == if i / 16 == 2 { 42 } else { 0 }));
        world.barrier().unwrap();
        x.memset32(world.rank(), 0, 1, 64, stream).unwrap();
        x.memset32(world.rank(), 63, u32::MAX, 1, stream).unwrap();
        assert_eq!(x.read(stream).unwrap()[62..], [1, u32::MAX]);
        assert_eq!(driver.calls("cuMemsetD32Async"), 3);
        x.write(&[0; 64], stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn words_of_any_rank_are_written_one_by_one() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let peer = 1 - world.rank();
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        for (at, value) in [(0, 5), (1, 0), (2, u32::MAX), (3, 7)] {
            x.write_value32(peer, at, value, stream).unwrap();
        }
        world.barrier().unwrap();
        assert_eq!(x.read(stream).unwrap(), [5, 0, u32::MAX, 7]);
        assert_eq!(driver.calls("cuStreamWriteValue32"), 4);
    });
}

#[test]
fn bad_words_are_refused_and_nothing_is_put_into_the_stream() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let x = gpu.alloc::<u32>(world, 64).unwrap().rendezvous(world).unwrap();
        for (offset, value, count, why) in [
            (0, 1, 0, "count must be a positive integer"),
            (64, 1, 1, "offset + count (65) exceeded the numel of the input (64)"),
            (0, 1, 65, "offset + count (65) exceeded the numel of the input (64)"),
            (usize::MAX, 1, usize::MAX, "exceeded the numel"),
        ] {
            let e = x.memset32(0, offset, value, count, stream).unwrap_err().to_string();
            assert!(e.contains("memset32") && e.contains(why), "{e}");
        }
        let e = x.write_value32(0, 64, 1, stream).unwrap_err().to_string();
        let why = "offset (64) exceeded the numel of the input (64)";
        assert!(e.contains("write_value32") && e.contains(why), "{e}");
        let e = x.memset32(1, 0, 1, 1, stream).unwrap_err().to_string();
        assert!(e.contains("a rank in [0, 1), got 1"), "{e}");
        assert_eq!(driver.calls("cuMemsetD32Async") + driver.calls("cuStreamWriteValue32"), 0);
        x.memset32(0, 0, 3, 1, stream).unwrap();
        x.write_value32(0, 63, 4, stream).unwrap();
        let words = x.read(stream).unwrap();
        assert_eq!((words[0], words[1], words[63]), (3, 0, 4));
    });
}

#[test]
fn a_fill_is_captured_and_done_again() {
    ranks(&drivers(1), |world, _, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let graph = stream.capture(|| x.memset32(0, 1, 9, 2, stream)).unwrap();
        for _ in 0..2 {
            x.write(&[0; 4], stream).unwrap();
            // SAFETY: the memory is there.
            unsafe { graph.launch(stream) }.unwrap();
            assert_eq!(x.read(stream).unwrap(), [0, 9, 9, 0]);
        }
    });
}
