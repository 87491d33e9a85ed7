//! Whether there is UCX to test with.

use std::process::Command;
use std::sync::OnceLock;

/// What the process is told that is to find out.
const ASKED: &str = "SYMMEM_TEST_ASKED_FOR_UCX";

/// Whether ranks can use UCX, or why the test is skipped; `test` is [`crate::test_name!`] of the test that asks first.
///
/// Another process finds out: UCX patches the process that loads it, unless its environment says otherwise.
pub fn has_ucx(test: &str) -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    if std::env::var_os(ASKED).is_some() {
        match symmem_sys::ucx::load() {
            Ok(_) => std::process::exit(0),
            Err(missing) => {
                eprintln!("skipped: {missing}");
                std::process::exit(1);
            }
        }
    }
    let is_rank = std::env::var_os(crate::processes::TEST).is_some();
    is_rank || *FOUND.get_or_init(|| ask(test))
}

fn ask(test: &str) -> bool {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", test, "--nocapture"]).env(ASKED, "1").env("UCX_MEM_EVENTS", "n");
    let has = again.status().unwrap().success();
    let set = std::env::var_os("SYMMEM_UCX").is_some();
    assert!(has || !set, "the file that SYMMEM_UCX names is missing");
    has
}
