//! What a client sends to the store's server: any bytes, in pieces of any size, never a panic, and always
//! the same meaning however they are cut.
//!
//! With cargo-fuzz: `cargo +nightly fuzz run store_server`. Without it, from the root of the repository:
//!
//! ```sh
//! mkdir -p fuzz/artifacts
//! RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
//!   -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
//!   -Zsanitizer=address --cfg fuzzing -Ccodegen-units=1" \
//! cargo +nightly run --manifest-path fuzz/Cargo.toml --target x86_64-unknown-linux-gnu --release \
//!   --bin store_server -- -max_total_time=20 -rss_limit_mb=2048 -artifact_prefix=fuzz/artifacts/
//! ```
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((cut, input)) = data.split_first() else { return };
    // Every other input as from a client that has been let in, for else few get past the first query.
    let validated = [&b"\0"[..], &0x3C85_F7CE_u32.to_ne_bytes(), input].concat();
    let input = if cut % 2 == 0 { &validated[..] } else { input };
    symmem::store::fuzzing::serve(usize::from(*cut), input);
});
