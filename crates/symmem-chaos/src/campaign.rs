//! Many programs, one after the other, and what came of all of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use symmem_chaos::random::Random;

use crate::generate::{AGREE, generate};
use crate::pool::Workers;
use crate::reduce::reduce;
use crate::report::{Report, Violation};
use symmem_chaos::program::{Mode, Spec};

/// How long a failing program is made smaller.
const REDUCING: Duration = Duration::from_secs(20);
const SHOWN: Duration = Duration::from_secs(10);
/// So many programs as threads come on one as processes.
const THREADS: u64 = 8;

pub struct Options {
    time: Duration,
    seed: Option<u64>,
    ranks: (usize, usize),
    modes: Vec<Mode>,
    /// This one, and nothing else.
    program: Option<Spec>,
    times: u64,
    reduce: bool,
    /// Ranks call the same things.
    agree: bool,
}

impl Options {
    pub fn parse(arguments: &[String]) -> anyhow::Result<Self> {
        let mut options = Self {
            time: Duration::from_secs(60),
            seed: None,
            ranks: (2, 6),
            modes: vec![Mode::Threads, Mode::Processes],
            program: None,
            times: 1,
            reduce: true,
            agree: false,
        };
        let mut words = arguments.iter();
        while let Some(option) = words.next() {
            let value = words.next().with_context(|| format!("{option} needs a value"))?;
            match option.as_str() {
                "--minutes" => options.time = Duration::from_secs_f64(60.0 * value.parse::<f64>()?),
                "--seconds" => options.time = Duration::from_secs_f64(value.parse()?),
                "--seed" => options.seed = Some(value.parse()?),
                "--ranks" => options.ranks = ranks(value)?,
                "--program" => options.program = Some(value.parse()?),
                "--times" => options.times = value.parse()?,
                "--reduce" => options.reduce = value == "yes",
                "--agree" => options.agree = value == "yes",
                "--mode" => {
                    options.modes = match value.as_str() {
                        "threads" => vec![Mode::Threads],
                        "processes" => vec![Mode::Processes],
                        "both" => vec![Mode::Threads, Mode::Processes],
                        _ => bail!("--mode {value}: threads, processes or both"),
                    }
                }
                _ => bail!("unknown option {option}"),
            }
        }
        Ok(options)
    }
}

fn ranks(text: &str) -> anyhow::Result<(usize, usize)> {
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let (least, most) = (least.parse()?, most.parse()?);
    if least == 0 || least > most || most > 6 {
        bail!("--ranks {text}: from 1 to 6");
    }
    Ok((least, most))
}

#[derive(Default)]
struct Sum {
    programs: u64,
    report: Report,
    /// By class: how often, and the first program that showed it.
    violations: BTreeMap<String, (u64, Spec, Violation)>,
}

/// Runs until the time is over. True if every promise was kept.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    let mut workers = Workers::new()?;
    if let Some(spec) = &options.program {
        return one(&mut workers, spec, options.times);
    }
    let seed = options.seed.unwrap_or_else(|| Random::unseeded().next() >> 16);
    println!("chaos: seed {seed}, for {:?}", options.time);
    let (begin, mut shown, mut sum) = (Instant::now(), Instant::now(), Sum::default());
    while begin.elapsed() < options.time {
        let spec = nth(options, seed + sum.programs);
        let report = workers.run(&spec)?;
        sum.programs += 1;
        sum.report.add(&report);
        for violation in report.violations {
            sum.note(&mut workers, &spec, violation, options.reduce);
        }
        if shown.elapsed() > SHOWN {
            shown = Instant::now();
            println!("{:4.0} s: {}", begin.elapsed().as_secs_f64(), sum.line());
        }
    }
    sum.print(begin.elapsed());
    Ok(sum.violations.is_empty())
}

/// The program of a seed: how its ranks run follows from it too.
fn nth(options: &Options, seed: u64) -> Spec {
    let (least, most) = options.ranks;
    let ranks = least + Random(seed).below(most - least + 1);
    let threads = options.modes.contains(&Mode::Threads);
    let processes = options.modes.contains(&Mode::Processes);
    let mode = match processes && (!threads || seed.is_multiple_of(THREADS)) {
        true => Mode::Processes,
        false => Mode::Threads,
    };
    let without = if options.agree { vec![AGREE] } else { Vec::new() };
    Spec { mode, ranks, seed, without }
}

/// One program, some times, in full.
fn one(workers: &mut Workers, spec: &Spec, times: u64) -> anyhow::Result<bool> {
    println!("{spec}: {}", generate(spec));
    let mut kept = true;
    for _ in 0..times {
        let report = workers.run(spec)?;
        for violation in &report.violations {
            println!("{}: {}", violation.class, violation.text);
        }
        kept &= report.violations.is_empty();
    }
    println!("{}", if kept { "every promise was kept" } else { "a promise was not kept" });
    Ok(kept)
}

impl Sum {
    fn note(&mut self, workers: &mut Workers, spec: &Spec, found: Violation, smaller: bool) {
        if let Some((count, ..)) = self.violations.get_mut(&found.class) {
            *count += 1;
            return;
        }
        println!("\n{spec}: {}\n  {}", found.class, found.text);
        let class = found.class.clone();
        let reduced = smaller.then(|| reduce(workers, spec, &class, REDUCING)).flatten();
        let shown = match reduced {
            Some((spec, report)) => {
                for violation in report.violations.iter().filter(|v| v.class == class) {
                    println!("reduced:\n  {}", violation.text);
                }
                spec
            }
            None => spec.clone(),
        };
        println!("chaos --program {shown}\n{}", generate(&shown));
        self.violations.insert(class, (1, shown, found));
    }

    fn line(&self) -> String {
        let violations: u64 = self.violations.values().map(|(count, ..)| count).sum();
        format!("{} programs, {} calls, {violations} violations", self.programs, self.report.calls)
    }

    fn print(&self, time: Duration) {
        println!("\n{} in {:.1} s", self.line(), time.as_secs_f64());
        let list = |of: &BTreeMap<String, u64>| {
            let words: Vec<String> = of.iter().map(|(name, n)| format!("{name} {n}")).collect();
            words.join(", ")
        };
        println!("faults: {}", list(&self.report.faults));
        println!("errors: {}", list(&self.report.errors));
        for (class, (count, spec, _)) in &self.violations {
            println!("violation: {class}: {count} times; chaos --program {spec}");
        }
    }
}
