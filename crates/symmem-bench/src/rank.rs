//! The hidden subcommand that each rank runs: goes through the rows in rounds, and rank 0 reports each figure.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use std::sync::atomic::Ordering;
use symmem::World;

use super::board::Board;
use super::clock;
use super::measure::Bench;
use super::record::Record;
use super::rows::{How, Measure, ROWS};
use super::settings::{Backend, Settings};
use symmem_launch::Job;

/// The name of the hidden subcommand.
pub const SUBCOMMAND: &str = "bench-rank";

/// Measures as one rank
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The rows, all of them within ranks; without any, only tells when the first barrier is done
    rows: Vec<String>,
    #[command(flatten)]
    settings: Settings,
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// The number of the first round
    #[arg(long, default_value_t = 1)]
    first: usize,
    /// This process is so many ranks, as threads
    #[arg(long)]
    threads: Option<usize>,
    #[arg(long)]
    no_pin: bool,
}

/// A job of `ranks` ranks that run this subcommand.
pub(super) fn job(ranks: usize, options: Vec<String>) -> Job {
    // Not `current_exe`: that name is gone once the program has been rebuilt.
    let command = ["/proc/self/exe", SUBCOMMAND].into_iter().map(OsString::from);
    let command = command.chain(options.into_iter().map(OsString::from)).collect();
    Job { collect: true, ..Job::new(command, ranks) }
}

impl Args {
    /// Joins the world and measures.
    pub fn run(self) -> Result<ExitCode> {
        if self.rows.is_empty() {
            return self.start_only();
        }
        let size = std::env::var("WORLD_SIZE").ok().and_then(|size| size.parse().ok());
        let size = self.threads.or(size).unwrap_or(1);
        let options = World::builder()
            .signal_pad_size(Board::pad_size(size).max(symmem::DEFAULT_SIGNAL_PAD_SIZE))
            .backend(self.settings.backend.of_world().to_owned());
        match self.threads {
            None => self.measure(&options.join_env()?)?,
            Some(n) => {
                let ranks = options.threads(n, |world| self.measure(&world))?;
                ranks.into_iter().collect::<Result<Vec<()>>>()?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn measure(&self, world: &World) -> Result<()> {
        let memory = world.alloc::<u64>(0)?.rendezvous(world)?;
        let board = Board::new(memory.handle())?;
        // The driver has threads of its own, which would have to share the core.
        if !self.no_pin && self.settings.backend != Backend::Cuda {
            clock::pin(world.rank())?;
        }
        let bench = Bench::new(world, &board, self.settings.quick)?;
        self.rounds(bench)?;
        Ok(world.barrier()?)
    }

    /// For who measures how long it takes to get here.
    fn start_only(&self) -> Result<ExitCode> {
        let world = World::from_env()?;
        world.barrier()?;
        writeln!(std::io::stdout(), "{}", world.size()).context("cannot report")?;
        // Nobody leaves before all have reported.
        world.barrier()?;
        Ok(ExitCode::SUCCESS)
    }

    fn rounds(&self, mut bench: Bench<'_>) -> Result<()> {
        let inside = ROWS.iter().filter(|row| row.how == How::InRanks);
        let wanted = inside.filter(|row| self.rows.iter().any(|name| name == row.name));
        let measures: Vec<_> = wanted.flat_map(|row| row.measures(&self.settings)).collect();
        for round in self.first..self.first + self.rounds {
            for measure in &measures {
                self.figure(&mut bench, measure, round)?;
            }
        }
        Ok(())
    }

    /// One figure of one round, or two where the reading of the result is timed too.
    fn figure(&self, bench: &mut Bench<'_>, measure: &Measure, round: usize) -> Result<()> {
        let (group, board) = (bench.group, bench.board);
        let make = measure.make.context("this row is not measured within ranks")?;
        // Made again in every round: all of them together would take too much memory.
        let mut case = make(measure, group, board)?;
        let taken = bench.measure(measure, case.as_mut())?;
        let verified = all(board, taken.verified);
        if board.rank() != 0 {
            return Ok(());
        }
        for (samples, ending) in [(Some(taken.samples), ""), (taken.with_read, "+read")] {
            let Some(samples) = samples else { continue };
            let mut record = Record::new(measure, board.ranks(), round, &samples, verified);
            record.collective += ending;
            self.settings.backend.name().clone_into(&mut record.backend);
            record.host_us = case.host_us();
            let line = record.line()?;
            std::io::stdout().write_all(line.as_bytes()).context("cannot report")?;
        }
        Ok(())
    }
}

/// Whether it is so on all ranks.
fn all(board: &Board<'_>, here: bool) -> bool {
    let counter = |rank| board.counter(rank);
    counter(board.rank()).store(here.into(), Ordering::Relaxed);
    board.barrier();
    let everywhere = (0..board.ranks()).all(|rank| counter(rank).load(Ordering::Relaxed) == 1);
    board.barrier();
    everywhere
}
