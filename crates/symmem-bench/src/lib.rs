//! `symmem bench`: starts ranks of its own, measures, checks the results while it does, and prints a table.
//!
//! The machine's own limits are measured by the same processes in the same rounds as the library's calls, because
//! on a virtual machine only a ratio within one run means something. `docs/performance.md` says how, with figures.
//! A further row is one file in `rows/`.
#![deny(unsafe_code)]

mod board;
mod clock;
mod device;
mod hosts;
mod html;
mod measure;
mod peers;
mod plan;
mod progress;
mod rank;
mod raw;
mod record;
mod report;
mod rows;
mod settings;
mod sockets;
mod startup;
mod value;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

pub use rank::{Args as RankArgs, SUBCOMMAND as RANK};

use hosts::Network;
use peers::Peers;
use plan::Plan;
use progress::Progress;
use record::Record;
use rows::ROWS;
use settings::{Backend, Settings};
use symmem_launch::{Job, Outcome, Secret, Signals, launch_watched};

/// Measures the library on this machine and checks its results
#[derive(clap::Args, Debug)]
#[command(after_help = rows::help())]
pub struct Args {
    /// What to measure: a collective such as all_reduce, or another row of the list below [default: all]
    #[arg(value_name = "ROW")]
    rows: Vec<String>,

    /// How many ranks to start [default: each row's own number]
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u16).range(2..))]
    ranks: Option<u16>,

    /// How often to go through the rows; ratios are taken within a round
    #[arg(long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Also writes each round's figures to this file, one JSON object a line; when interrupted, those there are
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Also writes a page with charts and tables to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Leaves it to the kernel on which core a rank runs
    #[arg(long)]
    no_pin: bool,

    /// Also measures other systems in the same rounds, those that benches/peers (or DIR) has installed; on devices PyTorch's
    /// symmetric memory
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    peers: Option<Option<PathBuf>>,

    #[command(flatten)]
    settings: Settings,
}

impl Args {
    /// Measures and prints.
    pub fn run(mut self) -> Result<ExitCode> {
        if self.rows.is_empty() {
            self.settings.hurry();
        }
        self.settings.check()?;
        let ranks = self.ranks.map(usize::from);
        self.settings.ranks = ranks;
        let plan = Plan::new(&self.rows, ranks, self.rounds.into(), &self.settings)?;
        // Before the work, so that a file that cannot be written costs nobody half a minute.
        let mut json = self.json.as_ref().map(create).transpose()?;
        let mut page = self.html.as_ref().map(create).transpose()?;
        let find = |directory: &Option<PathBuf>| Peers::find(directory.as_deref(), &self.settings);
        let mut peers = self.peers.as_ref().map(find).transpose()?;
        let steps = plan.steps(peers.as_ref().map_or(0, Peers::count));
        let mut session = Session {
            signals: Signals::catch()?,
            progress: Progress::start(steps),
            records: Vec::new(),
        };
        let network = self.network()?;
        let interrupted = self.measure(&plan, &mut peers, network.as_ref(), &mut session)?;
        session.progress.clear();
        if let Some(file) = &mut json {
            let text: String = session.records.iter().map(Record::line).collect::<Result<_>>()?;
            file.write_all(text.as_bytes()).context("cannot write the JSON lines")?;
        }
        if let Some(interrupted) = interrupted {
            return Ok(ExitCode::from(128 | interrupted as u8));
        }
        if let Some(file) = &mut page {
            let page = html::page(&session.records, &command(), &html::machine());
            file.write_all(page.as_bytes()).context("cannot write the page")?;
        }
        let about_peers = peers.as_ref().map_or_else(String::new, Peers::text);
        let heading = network.map_or_else(String::new, |network| network.text(has_secret()));
        print(&(heading + &report::text(&session.records) + &plan.text() + &about_peers))?;
        let wrong = session.records.iter().find(|record| !record.verified);
        if let Some(Record { system, collective, ranks, round, .. }) = wrong {
            bail!("{system}: {collective} of {ranks} ranks gave a wrong result in round {round}");
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Goes through the plan; stops early at a signal, which it returns.
    fn measure(
        &self,
        plan: &Plan,
        peers: &mut Option<Peers>,
        network: Option<&Network>,
        session: &mut Session,
    ) -> Result<Option<i32>> {
        // With peers, the ranks are started again in every round, so that all take turns.
        let firsts = if peers.is_some() { 1..=plan.rounds } else { 1..=1 };
        let rounds = if peers.is_some() { 1 } else { plan.rounds };
        for first in firsts {
            for (ranks, rows) in plan.jobs() {
                let job = self.job(ranks, &rows, (first, rounds), network);
                let mut interrupted = session.run(&job, plan.rounds)?;
                if let (Some(peers), None) = (peers.as_mut(), interrupted) {
                    let rounds = (first, plan.rounds);
                    interrupted =
                        peers.round(&rows, ranks, &self.settings, rounds, network, session)?;
                }
                if interrupted.is_some() {
                    return Ok(interrupted);
                }
            }
        }
        let quick = self.settings.quick;
        plan.startup().map_or(Ok(None), |ranks| startup::measure(ranks, quick, session))
    }

    /// The hosts, if there are to be several.
    fn network(&self) -> Result<Option<Network>> {
        let Some((each, hosts)) = self.settings.shape() else { return Ok(None) };
        let ranks = self.settings.ranks.unwrap_or(each * hosts);
        let network = Network::make(hosts, self.settings.rate.as_deref(), ranks)?;
        // In name only, hosts would share memory, and peers would use it.
        if let (Some(_), Some(why)) = (&self.peers, network.no_spaces()) {
            bail!("--peers with --hosts needs network namespaces: {why}");
        }
        Ok(Some(network))
    }

    fn job(
        &self,
        ranks: usize,
        rows: &[&'static str],
        (first, rounds): (usize, usize),
        network: Option<&Network>,
    ) -> Job {
        let mut options = vec![format!("--first={first}"), format!("--rounds={rounds}")];
        options.extend(self.no_pin.then(|| "--no-pin".to_owned()));
        options.extend(self.settings.options());
        options.extend(rows.iter().map(|&row| row.to_owned()));
        if let Some(network) = network {
            options.extend(network.options());
            // As the sockets that they are compared with, unless the user has given a secret.
            let place = Some(network.store());
            return Job {
                secret: Secret::Inherited,
                master_addr: place,
                ..rank::job(ranks, options)
            };
        }
        if self.settings.backend != Backend::Process {
            return rank::job(ranks, options);
        }
        options.push(format!("--threads={ranks}"));
        rank::job(1, options)
    }
}

/// What lasts from the first job to the table.
struct Session {
    signals: Signals,
    progress: Progress,
    records: Vec<Record>,
}

impl Session {
    /// Runs ranks that report records; a signal that ended them is returned.
    fn run(&mut self, job: &Job, rounds: usize) -> Result<Option<i32>> {
        let mut strange = None;
        let (progress, records) = (&mut self.progress, &mut self.records);
        let mut watch = |rank: usize, line: &[u8]| match serde_json::from_slice::<Record>(line) {
            Ok(record) => {
                progress.step(&record.title(), record.round, rounds);
                records.push(record);
            }
            Err(_) => strange = Some((rank, String::from_utf8_lossy(line).into_owned())),
        };
        let outcome = launch_watched(job, &mut self.signals, &mut watch)?;
        if let Some((rank, line)) = strange {
            bail!("rank {rank} wrote what is no result: {line}");
        }
        ended(&outcome)
    }
}

/// The signal that interrupted the ranks, or nothing if they all went well.
fn ended(outcome: &Outcome) -> Result<Option<i32>> {
    if outcome.interrupted.is_none() {
        ensure!(outcome.first.is_none(), "a rank failed, so there is nothing to compare");
    }
    Ok(outcome.interrupted)
}

/// Whether the user has given one, with which ranks encrypt what passes between hosts.
fn has_secret() -> bool {
    let given = ["SYMMEM_SECRET", "SYMMEM_SECRET_FILE"].map(std::env::var_os);
    given.iter().flatten().any(|value| !value.is_empty())
}

fn create(path: &PathBuf) -> Result<std::fs::File> {
    std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

/// The command as it was given, with the program's name alone.
fn command() -> String {
    let words =
        std::env::args_os().skip(1).skip_while(|word| word == symmem_launch::guard::SUBCOMMAND);
    let rest = words.map(|word| word.to_string_lossy().into_owned());
    std::iter::once("symmem".to_owned()).chain(rest).collect::<Vec<_>>().join(" ")
}

fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // Who closes the pipe has seen enough.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot print"),
        _ => Ok(()),
    }
}
