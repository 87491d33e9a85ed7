//! Other systems, measured by the programs of `benches/peers` in the same rounds as the library.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Session;
use super::settings::Settings;
use crate::run::{Job, launch_watched};

/// What of a bench the peers can do too.
const KNOWN: [&str; 6] =
    ["barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"];

/// The peers of this machine.
pub(super) struct Peers {
    script: PathBuf,
    ready: Vec<String>,
    missing: Vec<String>,
    /// Those that were started and gave nothing.
    failed: Vec<String>,
}

impl Peers {
    /// Asks which there are; those that can be built and are not yet are built.
    pub(super) fn find() -> Result<Self> {
        let script = script()?;
        let mut command = Command::new("bash");
        command.arg(&script).arg("list").stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().context("cannot ask for the peers")?;
        ensure!(output.status.success(), "{} list failed: {}", script.display(), output.status);
        let (ready, missing) = parse(&String::from_utf8_lossy(&output.stdout));
        Ok(Self { script, ready, missing, failed: Vec::new() })
    }

    /// How many will be measured.
    pub(super) fn count(&self) -> usize {
        self.ready.len()
    }

    /// One round of each, of those of `rows` that they know; returns the signal that ended it early.
    pub(super) fn round(
        &mut self,
        rows: &[&str],
        ranks: usize,
        settings: &Settings,
        (round, rounds): (usize, usize),
        session: &mut Session,
    ) -> Result<Option<i32>> {
        let known: Vec<_> = rows.iter().copied().filter(|row| KNOWN.contains(row)).collect();
        if known.is_empty() {
            return Ok(None);
        }
        let sizes: Vec<_> = settings.sizes().iter().map(ToString::to_string).collect();
        let asked = [
            ("OPS", known.join(" ")),
            ("BYTES", sizes.join(",")),
            ("DTYPE", settings.dtype.clone()),
            ("ROUND", round.to_string()),
            ("TIME_MS", settings.time().as_millis().to_string()),
        ];
        for name in &self.ready {
            let mut command = vec![OsString::from("env")];
            command.extend(asked.iter().map(|(key, value)| format!("PEERS_{key}={value}").into()));
            command.extend(["bash".into(), self.script.clone().into_os_string()]);
            command.extend(["run".into(), name.into(), ranks.to_string().into()]);
            let job = Job { collect: true, ..Job::new(command, 1) };
            let before = session.records.len();
            let mut watch = |_: usize, line: &[u8]| {
                // What is no figure is for whoever reads the script's log.
                session.records.extend(serde_json::from_slice(line).ok());
            };
            let outcome = launch_watched(&job, &mut session.signals, &mut watch)?;
            if outcome.interrupted.is_some() {
                return Ok(outcome.interrupted);
            }
            if session.records.len() == before && !self.failed.contains(name) {
                self.failed.push(name.clone());
            }
            session.progress.step(name, round, rounds);
        }
        Ok(None)
    }

    /// Which peers there were, for the end of the report.
    pub(super) fn text(&self) -> String {
        let list = |title: &str, names: &[String]| match names {
            [] => String::new(),
            names => format!("{title}: {}\n", names.join(", ")),
        };
        let mut text = list("peers measured", &self.ready);
        text += &list("peers that gave nothing", &self.failed);
        let install = format!("peers not installed (bash {} install NAME)", self.script.display());
        text + &list(&install, &self.missing)
    }
}

/// Names that are ready, and the others.
fn parse(list: &str) -> (Vec<String>, Vec<String>) {
    let words = list.lines().filter_map(|line| line.split_once(' '));
    let (ready, missing): (Vec<_>, Vec<_>) = words.partition(|(_, state)| *state == "ready");
    let names =
        |list: Vec<(&str, &str)>| list.into_iter().map(|(name, _)| name.to_owned()).collect();
    (names(ready), names(missing))
}

/// `benches/peers/peers.sh` in this directory or one above it, or above the program's own.
fn script() -> Result<PathBuf> {
    let here = std::env::current_dir().context("there is no current directory")?;
    let program = std::env::current_exe().unwrap_or_default();
    let script = |directory: &Path| directory.join("benches/peers/peers.sh");
    let directories = here.ancestors().chain(program.ancestors());
    let found = directories.map(script).find(|path| path.is_file());
    let found = found.context(
        "there is no benches/peers/peers.sh here or above: run it within the repository",
    )?;
    Ok(found.strip_prefix(&here).map_or(found.clone(), Path::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_ready_or_missing() {
        let (ready, missing) = parse("ompi4 ready\nimpi missing\ngloo missing: no torch\n\n");
        assert_eq!((ready.as_slice(), missing.len()), (&["ompi4".to_owned()][..], 2));
    }
}
