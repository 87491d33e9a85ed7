//! What a rank of the same group writes where its messages to this one come from: anything, while threads of this rank wait
//! for messages and give up. Never a panic, never half a message, never more memory than is allowed. How to run it: see
//! `store_server.rs`, with the name of this file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| symmem::internals::fuzz_messages(data));
