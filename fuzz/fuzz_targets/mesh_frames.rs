//! What somebody sends to a rank that listens for ranks of other hosts: any bytes, in pieces of any size, never a panic, and
//! always the same frames however they are cut. How to run it: see `store_server.rs`, with the name of this file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((cut, input)) = data.split_first() else { return };
    // Every other input begins as a rank's, for else few get past the first frame.
    let opened = [&64_u16.to_le_bytes()[..], b"symmem 1", input].concat();
    let input = if cut % 2 == 0 { &opened[..] } else { input };
    symmem::internals::fuzz_frames(usize::from(*cut), input);
});
