//! The launcher: starts the ranks of a job as processes, and does not leave before all of them have.
//!
//! [`launch()`] runs a [`Job`]; [`Args`] are those of `symmem run`. A program that launches runs under a [`guard`], so that
//! nothing outlives it.
#![deny(unsafe_code, missing_docs)]

mod descendants;
pub mod guard;
mod job;
mod launch;
mod nodes;
mod output;
mod pump;
mod rank;
mod secret;
mod signals;
mod spawn;

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

pub use job::{GRACE, Job, OnFailure};
pub use launch::{launch, launch_watched};
pub use rank::End;
pub use secret::Secret;
pub use signals::{Request, Requests, Signals, name as signal_name};

/// Starts a program as several ranks
#[derive(clap::Args, Debug)]
pub struct Args {
    /// How many ranks to start on this node
    #[arg(short = 'n', long = "ranks", alias = "nproc-per-node", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,

    /// How many nodes take part; all start the same number of ranks
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    nnodes: u16,

    /// The number of this node, from 0 on; node 0 hosts the store
    #[arg(long, value_name = "I", default_value_t = 0)]
    node_rank: u16,

    /// The address at which all nodes reach node 0 [default with one node: 127.0.0.1]
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,

    /// The port of the store [default with one node: a free one]
    #[arg(long, value_name = "P")]
    master_port: Option<u16>,

    /// A file of mode 0600 with the job's secret, the same on all nodes: 16 bytes or more
    ///
    /// On one node the launcher generates a secret, unless SYMMEM_SECRET or SYMMEM_SECRET_FILE is set.
    #[arg(long, value_name = "F")]
    secret_file: Option<PathBuf>,

    /// How long ranks may take to end before they are killed
    ///
    /// The launcher asks them to end when a rank has failed, and when it gets SIGINT, SIGTERM, SIGHUP or SIGQUIT. A second
    /// SIGINT or SIGTERM kills them at once.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    grace: Duration,

    /// What to do with the other ranks when one fails
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = OnFailure::Kill)]
    on_failure: OnFailure,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

impl Args {
    /// How long ranks may take to end.
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// Runs the job.
    pub fn run(self) -> Result<ExitCode> {
        let secret = match &self.secret_file {
            Some(path) => Secret::file(path)?,
            None if self.nnodes > 1 => Secret::Inherited,
            None => Secret::own(),
        };
        if self.nnodes > 1 && self.node_rank == 0 && !secret.is_there() {
            tracing::warn!(
                "several nodes and no secret: whoever reaches the store can disturb the job, and what passes between nodes is not \
                 encrypted; give every node the same --secret-file"
            );
        }
        let job = Job {
            secret,
            nodes: self.nnodes.into(),
            node: self.node_rank.into(),
            master_addr: self.master_addr,
            master_port: self.master_port,
            grace: self.grace,
            on_failure: self.on_failure,
            ..Job::new(self.command, self.ranks.into())
        };
        let outcome = launch(&job, &mut Signals::catch()?)?;
        tracing::debug!(others = ?outcome.others, interrupted = outcome.interrupted, "the job is over");
        Ok(ExitCode::from(outcome.code))
    }
}

fn seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.parse()?)?)
}

/// How a job went.
#[derive(Debug)]
pub struct Outcome {
    /// The rank that failed first.
    pub first: Option<Failure>,
    /// The ranks that failed after it, other than by our ending them.
    pub others: Vec<Failure>,
    /// The last signal that asked this program to stop.
    pub interrupted: Option<i32>,
    /// What each rank wrote to standard output, where [`Job::collect`] asked for it.
    pub stdout: Vec<Vec<u8>>,
    /// The exit code for the whole job.
    pub code: u8,
}

/// A rank that did not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its rank in the world.
    pub rank: usize,
    /// How it ended.
    pub end: End,
}

impl Failure {
    fn is_crash(self) -> bool {
        matches!(self.end, End::Signal { .. })
    }

    /// Whether one of `signals` explains it: by killing the rank, or by making it exit as a shell would.
    fn is_due_to(self, signals: &[i32]) -> bool {
        signals.iter().any(|&signal| self.end.code() == 128 | signal as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.is_crash() { "was" } else { "failed with" };
        write!(f, "rank {} {verb} {}", self.rank, self.end)
    }
}

/// The program could not be started.
#[derive(Debug)]
pub struct NotStarted {
    program: OsString,
    source: std::io::Error,
}

impl NotStarted {
    /// What a shell would report.
    pub fn code(&self) -> u8 {
        if self.source.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }
    }
}

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot start {}", self.program.display())
    }
}

impl std::error::Error for NotStarted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
