//! Other systems, measured by the programs of `benches/peers` in the same rounds as the library: those of processors by
//! `peers.sh`, that of devices by `bench_symm_mem.py`, which the launcher starts itself.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Session;
use super::hosts::Network;
use super::record::Record;
use super::rows::{ROWS, between};
use super::settings::{Backend, Settings};
use symmem_launch::{Job, launch_watched};

/// PyTorch's symmetric memory, which is there for devices.
const ON_DEVICES: &str = "torch-symm-mem";
const ON_DEVICES_HAS: [&str; 3] = ["barrier", "all_reduce", "reduce_scatter"];
/// Whether a Python has it.
const ASK: &str = "import sys, torch, torch.distributed._symmetric_memory; sys.exit(not torch.cuda.is_available())";

/// What of a bench the peers may have too, each as much as it has: the barrier and the collectives.
fn is_known(row: &str, on_devices: bool) -> bool {
    if on_devices {
        return ON_DEVICES_HAS.contains(&row);
    }
    row == "barrier" || ROWS.iter().any(|r| r.name == row && r.fixed().is_empty())
}

/// Whether a row has to do with bytes, of whatever type.
fn is_untyped(row: &str) -> bool {
    row == "barrier" || between::is_one_sided(row)
}

/// The peers of this machine.
pub(super) struct Peers {
    script: PathBuf,
    /// The Python that runs it, if it is not a script of the shell.
    python: Option<OsString>,
    ready: Vec<Peer>,
    missing: Vec<String>,
    /// What went wrong, each said once.
    troubles: Vec<String>,
}

/// One that can be measured.
struct Peer {
    name: String,
    /// The types of elements that it has; all if it names none.
    types: Vec<String>,
    /// Those that were asked for and that it has not.
    without: Vec<&'static str>,
    gave: bool,
}

/// One run of a peer: rows it knows, of one type.
struct Run {
    rows: Vec<&'static str>,
    dtype: &'static str,
}

impl Peers {
    /// Asks which there are; those that can be built and are not yet are built.
    pub(super) fn find(directory: Option<&Path>, settings: &Settings) -> Result<Self> {
        if settings.backend == Backend::Cuda {
            return Self::on_devices(directory);
        }
        let script = found("peers.sh", directory)?;
        let mut command = Command::new("bash");
        command.arg(&script).arg("list").stdin(Stdio::null()).stderr(Stdio::inherit());
        command.envs(settings.hosts.map(|hosts| ("PEERS_HOSTS", hosts.to_string())));
        let output = command.output().context("cannot ask for the peers")?;
        ensure!(output.status.success(), "{} list failed: {}", script.display(), output.status);
        let (ready, missing) = parse(&String::from_utf8_lossy(&output.stdout));
        Ok(Self { script, python: None, ready, missing, troubles: Vec::new() })
    }

    fn on_devices(directory: Option<&Path>) -> Result<Self> {
        let script = found("bench_symm_mem.py", directory)?;
        let python = std::env::var_os("PEERS_PYTHON").unwrap_or_else(|| "python3".into());
        let mut command = Command::new(&python);
        command.args(["-c", ASK]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let has = command.status().is_ok_and(|status| status.success());
        let list = format!("{ON_DEVICES} {}", if has { "ready f32 bf16" } else { "missing" });
        let (ready, missing) = parse(&list);
        Ok(Self { script, python: Some(python), ready, missing, troubles: Vec::new() })
    }

    /// How many will be measured.
    pub(super) fn count(&self) -> usize {
        self.ready.len()
    }

    /// One round of each, of those of `rows` that they know; returns the signal that ended it early.
    pub(super) fn round(
        &mut self,
        rows: &[&'static str],
        ranks: usize,
        settings: &Settings,
        (round, rounds): (usize, usize),
        network: Option<&Network>,
        session: &mut Session,
    ) -> Result<Option<i32>> {
        let on_devices = self.python.is_some();
        let has = |row: &&str| {
            is_known(row, on_devices) || (network.is_some() && between::is_one_sided(row))
        };
        let known: Vec<_> = rows.iter().copied().filter(has).collect();
        if known.is_empty() {
            return Ok(None);
        }
        let sizes: Vec<_> = settings.sizes().iter().map(ToString::to_string).collect();
        let mut asked = vec![
            ("BYTES", sizes.join(",")),
            ("ROUND", round.to_string()),
            ("TIME_MS", settings.time().as_millis().to_string()),
        ];
        asked.extend(network.map(Network::for_peers).into_iter().flatten());
        if on_devices {
            asked.push(("GRAPH", u8::from(settings.graph).to_string()));
            asked.extend(settings.device.map(|device| ("DEVICE", device.to_string())));
            let devices = if settings.device.is_some() { 1 } else { super::device::count()? };
            asked.push(("NEIGHBOURS", ranks.div_ceil(devices).to_string()));
        }
        for peer in &mut self.ready {
            for run in peer.runs(&known, settings) {
                let job = match &self.python {
                    Some(python) => device_job(python, &self.script, ranks, &asked, &run)?,
                    None => job(&self.script, &peer.name, ranks, &asked, &run),
                };
                let before = network.map_or(Ok(0), Network::passed)?;
                let (mut records, mut troubles, interrupted) = launch(&job, &peer.name, session)?;
                if let Some(network) = network {
                    let passed = network.passed()? - before;
                    let went_by = went_by(&records, passed, &session.records);
                    if let Some(what) = went_by {
                        troubles.push(format!("{} is left out: {what}", peer.name));
                        records.clear();
                    }
                    records.iter_mut().for_each(|record| network.mark(record));
                }
                if interrupted.is_some() {
                    return Ok(interrupted);
                }
                peer.gave |= !records.is_empty();
                session.records.extend(records);
                for text in troubles {
                    if !self.troubles.contains(&text) {
                        self.troubles.push(text);
                    }
                }
            }
            session.progress.step(&peer.name, round, rounds);
        }
        Ok(None)
    }

    /// Which peers there were, for the end of the report.
    pub(super) fn text(&self) -> String {
        let list = |title: &str, names: Vec<String>| match names.as_slice() {
            [] => String::new(),
            names => format!("{title}: {}\n", names.join(", ")),
        };
        let measured = self.ready.iter().filter(|peer| peer.gave).map(|peer| peer.name.clone());
        let lacking = self.ready.iter().filter(|peer| !peer.without.is_empty());
        let lacking = lacking.map(|peer| format!("{} ({})", peer.name, peer.without.join(", ")));
        let mut text = list("peers measured", measured.collect());
        text += &list("peers without a type", lacking.collect());
        text += &self.troubles.iter().map(|line| format!("peer {line}\n")).collect::<String>();
        let install = match &self.python {
            Some(python) => {
                let python = python.to_string_lossy();
                format!(
                    "peers not there ({python} has no torch with CUDA; PEERS_PYTHON names another)"
                )
            }
            None => format!("peers not installed (bash {} install NAME)", self.script.display()),
        };
        text + &list(&install, self.missing.clone())
    }
}

impl Peer {
    /// One for each type that it has; rows that have none go with the first.
    fn runs(&mut self, rows: &[&'static str], settings: &Settings) -> Vec<Run> {
        let has = |dtype: &&str| self.types.is_empty() || self.types.iter().any(|t| t == dtype);
        let (types, without): (Vec<_>, Vec<_>) = settings.dtypes().into_iter().partition(has);
        let (mut untyped, sized): (Vec<_>, Vec<_>) = rows.iter().partition(|row| is_untyped(row));
        let run =
            |dtype| Run { rows: [std::mem::take(&mut untyped), sized.clone()].concat(), dtype };
        let mut runs: Vec<_> = types.into_iter().map(run).collect();
        if !untyped.is_empty() {
            runs.push(Run { rows: untyped, dtype: "f32" });
        }
        if !sized.is_empty() {
            self.without = without;
        }
        runs.retain(|run| !run.rows.is_empty());
        runs
    }
}

fn job(script: &Path, name: &str, ranks: usize, asked: &[(&str, String)], run: &Run) -> Job {
    let mut command = environment(asked, run);
    command.extend(["bash".into(), script.as_os_str().to_owned()]);
    command.extend(["run".into(), name.into(), ranks.to_string().into()]);
    Job { collect: true, ..Job::new(command, 1) }
}

/// A run whose ranks are those of the job. They find each other in a store of their own, as they would without us.
fn device_job(
    python: &OsString,
    script: &Path,
    ranks: usize,
    asked: &[(&str, String)],
    run: &Run,
) -> Result<Job> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.context("there is no free port")?.port();
    let mut command: Vec<OsString> = ["timeout", "-k", "5", "120"].map(OsString::from).into();
    command.extend(environment(asked, run));
    command.push(format!("PEERS_PORT={port}").into());
    command.extend([python.clone(), script.as_os_str().to_owned()]);
    Ok(Job { collect: true, ..Job::new(command, ranks) })
}

/// `env`, and what is asked of a run as its variables.
fn environment(asked: &[(&str, String)], run: &Run) -> Vec<OsString> {
    let of_run = [("OPS", run.rows.join(" ")), ("DTYPE", run.dtype.to_owned())];
    let asked = asked.iter().chain(&of_run);
    let asked = asked.map(|(key, value)| format!("PEERS_{key}={value}").into());
    std::iter::once("env".into()).chain(asked).collect()
}

/// What a bare connection takes for a barrier at least, where that has not been measured.
const BARRIER_US: f64 = 4.0;

/// Why figures cannot have come about between hosts, if they cannot: ranks that share memory or are all on one host send less
/// than they say, and are faster than a bare connection.
fn went_by(figures: &[Record], passed: u64, all: &[Record]) -> Option<String> {
    let least: u64 = figures.iter().map(|f| (f.samples * f.bytes.max(1)) as u64).sum();
    if passed < least {
        return Some(format!("{passed} bytes passed between the hosts, and not {least}"));
    }
    let bare = all.iter().filter(|r| r.system == "sockets" && r.collective == "barrier");
    let least = bare.map(|record| record.p10_us).fold(BARRIER_US, f64::min) / 2.0;
    let barrier = figures.iter().find(|f| f.collective == "barrier" && f.median_us < least)?;
    Some(format!("its barrier takes {} µs, which no connection does", barrier.median_us))
}

/// What a run gave: figures, what went wrong, and the signal that ended it.
type Given = (Vec<Record>, Vec<String>, Option<i32>);

fn launch(job: &Job, name: &str, session: &mut Session) -> Result<Given> {
    let (mut records, mut troubles) = (Vec::<Record>::new(), Vec::new());
    let mut watch = |_: usize, line: &[u8]| match serde_json::from_slice::<Record>(line) {
        Ok(record) if record.system == name && record.verified => records.push(record),
        Ok(record) if record.system == name => {
            let bytes = record.bytes;
            troubles.push(format!("{name} was wrong: {} of {bytes} bytes", record.collective));
        }
        _ => {
            let line = String::from_utf8_lossy(line);
            troubles.push(format!("{name} wrote what is no figure of its own: {line}"));
        }
    };
    let outcome = launch_watched(job, &mut session.signals, &mut watch)?;
    if let Some(failure) = outcome.first {
        troubles.push(format!("{name} failed: {}", failure.end));
    } else if records.is_empty() && troubles.is_empty() {
        troubles.push(format!("{name} gave nothing"));
    }
    Ok((records, troubles, outcome.interrupted))
}

/// Those that are ready, and the names of the others.
fn parse(list: &str) -> (Vec<Peer>, Vec<String>) {
    let (mut ready, mut missing) = (Vec::new(), Vec::new());
    for line in list.lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        let Some(name) = words.next() else { continue };
        if words.next().as_deref() == Some("ready") {
            ready.push(Peer { name, types: words.collect(), without: Vec::new(), gave: false });
        } else {
            missing.push(name);
        }
    }
    (ready, missing)
}

/// The file of this name in the directory that the user names, or in `benches/peers` in this directory or one above it, or
/// above the program's own.
fn found(name: &str, directory: Option<&Path>) -> Result<PathBuf> {
    if let Some(directory) = directory {
        return Ok(directory.join(name));
    }
    let here = std::env::current_dir().context("there is no current directory")?;
    let program = std::env::current_exe().unwrap_or_default();
    let script = |directory: &Path| directory.join("benches/peers").join(name);
    let directories = here.ancestors().chain(program.ancestors());
    let found = directories.map(script).find(|path| path.is_file());
    let found = found.with_context(|| {
        format!("there is no benches/peers/{name} here or above: run it within the repository")
    })?;
    Ok(found.strip_prefix(&here).map_or(found.clone(), Path::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_ready_or_missing() {
        let (ready, missing) =
            parse("ompi4 ready\nimpi ready f32 bf16\ngloo missing\noneccl missing: no g++\n\n");
        let ready: Vec<_> = ready.iter().map(|p| (p.name.as_str(), p.types.len())).collect();
        assert_eq!(ready, [("ompi4", 0), ("impi", 2)]);
        assert_eq!(missing, ["gloo", "oneccl"]);
    }
}
