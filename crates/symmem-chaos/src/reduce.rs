//! Makes a failing program small: leaves out what it fails without.

use std::time::{Duration, Instant};

use crate::generate::generate;
use crate::pool::Workers;
use crate::report::Report;
use symmem_chaos::program::{Cut, Spec};

/// A race does not come every time.
const TRIES: usize = 3;

/// The smallest program found in that time that still fails so, and its report.
pub fn reduce(
    workers: &mut Workers,
    spec: &Spec,
    class: &str,
    time: Duration,
) -> Option<(Spec, Report)> {
    let begin = Instant::now();
    let mut best: Option<(Spec, Report)> = None;
    let mut spec = spec.clone();
    loop {
        let mut smaller = false;
        for candidate in candidates(&spec) {
            if begin.elapsed() > time {
                return best;
            }
            if let Some(report) = fails(workers, &candidate, class) {
                spec = candidate.clone();
                best = Some((candidate, report));
                smaller = true;
                break;
            }
        }
        if !smaller {
            return best;
        }
    }
}

fn fails(workers: &mut Workers, spec: &Spec, class: &str) -> Option<Report> {
    (0..TRIES).find_map(|_| {
        let report = workers.run(spec).ok()?;
        report.violations.iter().any(|v| v.class == class).then_some(report)
    })
}

/// The program without one of its parts, the large ones first.
fn candidates(spec: &Spec) -> Vec<Spec> {
    let program = generate(spec);
    let mut cuts: Vec<Vec<Cut>> = Vec::new();
    if program.lanes.len() > 1 {
        cuts.extend(program.lanes.iter().map(|lane| vec![Cut::Lane(lane.number)]));
    }
    let rounds = || program.lanes.iter().flat_map(|l| &l.rounds);
    if rounds().count() > 1 {
        cuts.extend(rounds().map(|r| r.steps.iter().map(|s| Cut::Call(s.call)).collect()));
    }
    let steps: Vec<_> = rounds().flat_map(|r| &r.steps).collect();
    if steps.len() > 3 {
        let halves = steps.chunks(steps.len().div_ceil(2));
        cuts.extend(halves.map(|half| half.iter().map(|s| Cut::Call(s.call)).collect()));
    }
    if program.jitter {
        cuts.push(vec![Cut::Jitter]);
    }
    // Faults are numbered as they were made: those that are there are those not left out.
    let made = generate(&Spec { without: Vec::new(), ..spec.clone() }).faults.len();
    let faults = (0..made).map(Cut::Fault).filter(|cut| !spec.without.contains(cut));
    cuts.extend(faults.map(|cut| vec![cut]));
    if steps.len() > 1 {
        cuts.extend(steps.iter().map(|step| vec![Cut::Call(step.call)]));
    }
    let differing = steps.iter().filter(|step| !step.variants.is_empty());
    cuts.extend(differing.map(|step| vec![Cut::Variant(step.call)]));
    let with = |more: Vec<Cut>| {
        let without = spec.without.iter().copied().chain(more).collect();
        Spec { without, ..spec.clone() }
    };
    cuts.into_iter().map(with).collect()
}
