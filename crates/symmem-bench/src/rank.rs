//! The hidden subcommand that each rank runs: goes through the rows in rounds, and rank 0 reports each figure.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use std::sync::atomic::Ordering;
use symmem::World;

use super::board::Board;
use super::measure::Bench;
use super::record::Record;
use super::rows::{How, Measure, ROWS};
use super::settings::{Backend, Settings};
use super::{clock, hosts, raw};
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
    /// The network namespace of each host
    #[arg(long)]
    space: Vec<PathBuf>,
    /// What ranks of several hosts share besides
    #[arg(long)]
    shared: Option<PathBuf>,
    /// Whether this process is in the place of its host already
    #[arg(long)]
    placed: bool,
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
        if let Some(hosts) = self.settings.hosts.filter(|_| !self.placed) {
            return self.take_place(size / usize::from(hosts));
        }
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

    /// Starts again as a rank of its host.
    fn take_place(&self, ranks_each: usize) -> Result<ExitCode> {
        let rank = std::env::var("RANK").ok().and_then(|rank| rank.parse::<usize>().ok());
        let host = rank.context("there is no RANK")? / ranks_each.max(1);
        if let Some(space) = self.space.get(host) {
            hosts::enter(&File::open(space).context("the host's network namespace is gone")?)?;
            let _ = raw::show_own_devices(); // UCX says itself what it does not find
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(std::env::args_os().skip(1)).arg("--placed");
        command.env("SYMMEM_HOST", format!("host-{host}"));
        for name in ["SYMMEM_ADDR", "SYMMEM_IFACE", "SYMMEM_PORTS"] {
            command.env_remove(name);
        }
        if std::env::var_os("RUST_LOG").is_none() {
            // The heading says whether connections are encrypted.
            command.env("RUST_LOG", "warn,symmem::mesh::connect=error");
        }
        Err(command.exec()).context("cannot start again as a rank of its host")
    }

    fn measure_between(&self, world: &World, shared: &Path) -> Result<()> {
        let file = File::options().read(true).write(true).open(shared);
        let file = file.context("the memory of all ranks is gone")?;
        let flags = Board::pad_size(world.size()) * world.size();
        let (words, readings) = raw::map_shared(&file, flags)?;
        let board = Board::shared(world.rank(), world.size(), words)?;
        if !self.no_pin {
            clock::pin(world.rank())?;
        }
        self.rounds(Bench::between_hosts(world, &board, readings, self.settings.quick))?;
        Ok(world.barrier()?)
    }

    fn measure(&self, world: &World) -> Result<()> {
        if let Some(shared) = &self.shared {
            return self.measure_between(world, shared);
        }
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
        let mut settings = self.settings.clone();
        settings.ranks = Some(bench.group.size());
        let measures: Vec<_> = wanted.flat_map(|row| row.measures(&settings)).collect();
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
            if let Some(hosts) = self.settings.hosts {
                let rate = self.settings.rate.as_deref();
                record.between(hosts.into(), !self.space.is_empty(), rate);
            }
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
