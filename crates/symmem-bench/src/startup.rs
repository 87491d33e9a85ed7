//! How long it takes from nothing to the first barrier done on all ranks, as the launcher sees it.

use std::time::Instant;

use anyhow::{Context, Result};

use super::record::{Record, Sample};
use super::rows::measure as measure_of;
use super::{Session, ended, rank};
use symmem_launch::launch_watched;

/// How often the ranks are started.
pub(super) const TIMES: usize = 7;

/// Starts ranks a few times; returns the signal that ended it early.
pub(super) fn measure(ranks: usize, quick: bool, session: &mut Session) -> Result<Option<i32>> {
    let measure = measure_of("startup").context("there is no row for it")?;
    let (mut samples, mut verified) = (Vec::new(), true);
    let times = if quick { 1 } else { TIMES };
    for time in 1..=times {
        let job = rank::job(ranks, Vec::new());
        let expected = ranks.to_string();
        let (mut reports, mut last) = (0, None);
        let begin = Instant::now();
        let mut watch = |_: usize, line: &[u8]| {
            reports += usize::from(line == expected.as_bytes());
            last = Some(begin.elapsed());
        };
        let outcome = launch_watched(&job, &mut session.signals, &mut watch)?;
        if let Some(signal) = ended(&outcome)? {
            return Ok(Some(signal));
        }
        verified &= reports == ranks;
        let ns = last.map_or(f64::NAN, |time| time.as_secs_f64() * 1e9);
        samples.push(Sample { ns, as_near: false });
        session.progress.step("startup", time, times);
    }
    session.records.push(Record::new(measure, ranks, 1, &samples, verified));
    Ok(None)
}
