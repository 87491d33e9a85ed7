//! Ranks that die, stop, leave, run out of something or are lied to: what the others are told, how soon, and how they go on.
//!
//! Ranks are processes. The harness checks after every test that no process and no file is left. Deadlines are a minute
//! unless said otherwise: a rank that gets its error within seconds was told of the death and did not wait for the deadline.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

mod failure {
    use std::time::{Duration, Instant};

    use symmem::Error;
    use symmem_testing::mark;

    mod connecting;
    mod exhaustion;
    mod halfway;
    mod launchers;
    mod leaving;
    mod messages;
    mod scale;
    mod shrinking;
    mod strangers;
    mod working;

    /// Far above what notice of a death takes on a busy machine, far below the deadline.
    const SOON: Duration = Duration::from_secs(5);

    /// The lost rank that the failed call names; it must have been told soon.
    fn lost_in<T, E: Into<Error>>(call: impl FnOnce() -> Result<T, E>) -> usize {
        let begin = Instant::now();
        let result = call();
        mark("noticed", "");
        match result.map(drop).map_err(Into::into) {
            Err(Error::PeerLost { rank, during, how, .. }) => {
                println!("{during}: rank {rank} is gone: {how}");
                assert!(begin.elapsed() < SOON, "told after {:?}", begin.elapsed());
                rank
            }
            other => panic!("expected a lost peer, got {other:?}"),
        }
    }

    /// The ranks that the call was waiting for at its deadline, of `limit` from its beginning.
    fn timed_out_in<T, E: Into<Error>>(
        limit: Duration,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Vec<usize> {
        let begin = Instant::now();
        let result = call();
        let took = begin.elapsed();
        println!("a deadline of {limit:?} was told after {took:?}");
        match result.map(drop).map_err(Into::into) {
            Err(Error::Timeout { waiting_for, .. }) => {
                assert!(limit.mul_f64(0.9) < took && took < limit + SOON, "told after {took:?}");
                waiting_for
            }
            other => panic!("expected a timeout, got {other:?}"),
        }
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }
}
