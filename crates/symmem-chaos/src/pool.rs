//! Processes that run programs, used again and again: one for all ranks as threads, or one for each rank.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use symmem::store::TcpServer;
use symmem_chaos::random::Random;

use crate::generate::generate;
use crate::judge;
use crate::report::Report;
use symmem_chaos::board::Board;
use symmem_chaos::program::{Mode, Spec};
use symmem_chaos::record::{Event, decode, now};

/// No program takes longer, or something hangs.
const HANG: Duration = Duration::from_secs(60);

struct Worker {
    child: Child,
    lines: Receiver<String>,
}

impl Worker {
    fn start(dir: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("worker")
            .env("TMPDIR", dir.join("tmp"))
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("SYMMEM_SOCKET_DIR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (sender, lines) = channel();
        let stdout = child.stdout.take();
        std::thread::spawn(move || {
            for line in stdout.into_iter().flat_map(|out| BufReader::new(out).lines()) {
                if line.map_or(true, |line| sender.send(line).is_err()) {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    fn say(&mut self, line: &str) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
        }
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id() as i32)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            let _ = kill_process(pid, Signal::CONT);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All that one run of the checker has on the machine.
pub struct Workers {
    dir: PathBuf,
    threads: Option<Worker>,
    ranks: Vec<Option<Worker>>,
}

impl Workers {
    pub fn new() -> anyhow::Result<Self> {
        // Ranks note what they are about to do: a file on a disk may keep them waiting, which is neither the call's time nor
        // counted as time without a core.
        let name = format!("chaos-{:016x}", Random::unseeded().next());
        let dirs = [PathBuf::from("/dev/shm"), std::env::temp_dir()].map(|base| base.join(&name));
        let make = |dir: &PathBuf| std::fs::create_dir_all(dir.join("tmp")).is_ok();
        let dir = dirs.into_iter().find(make).context("no directory for the notes of ranks")?;
        Ok(Self { dir, threads: None, ranks: Vec::new() })
    }

    /// Runs a program and says what came of it.
    pub fn run(&mut self, spec: &Spec) -> anyhow::Result<Report> {
        match spec.mode {
            Mode::Threads => self.as_threads(spec),
            Mode::Processes => self.as_processes(spec),
        }
    }

    fn as_threads(&mut self, spec: &Spec) -> anyhow::Result<Report> {
        let mut worker = match self.threads.take() {
            Some(worker) => worker,
            None => Worker::start(&self.dir)?,
        };
        worker.say(&format!("threads {spec}"));
        let (begin, mut lines) = (Instant::now(), Vec::new());
        loop {
            match worker.lines.recv_timeout(HANG.saturating_sub(begin.elapsed())) {
                Ok(line) if line == "." => break,
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Timeout) => {
                    return Ok(Report::violation("hang", format!("not over after {HANG:?}")));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = worker.child.wait()?;
                    return Ok(Report::violation("crash", format!("the process ended: {status}")));
                }
            }
        }
        let report = Report::parse(&lines);
        // What is left over would be found again after the next program.
        if report.violations.iter().all(|v| v.class != "left over") {
            self.threads = Some(worker);
        }
        Ok(report)
    }

    fn as_processes(&mut self, spec: &Spec) -> anyhow::Result<Report> {
        let (dir, n) = (self.dir.clone(), spec.ranks);
        self.ranks.resize_with(n.max(self.ranks.len()), || None);
        let board = Arc::new(Board::create(&dir.join("board"))?);
        let server = TcpServer::bind(&format!("unix:{}/store", dir.display()))?;
        for rank in 0..n {
            std::fs::write(dir.join(format!("log{rank}")), "")?;
            if self.ranks[rank].is_none() {
                self.ranks[rank] = Some(Worker::start(&dir)?);
            }
            if let Some(worker) = &mut self.ranks[rank] {
                while worker.lines.try_recv().is_ok() {}
                worker.say(&format!("rank {rank} {spec} {}", dir.display()));
            }
        }
        let stops = Arc::new(Mutex::new(Vec::new()));
        let hung = self.supervise(n, &board, &stops);
        drop(server);
        let mut events = stops.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for rank in 0..n {
            let text = std::fs::read_to_string(dir.join(format!("log{rank}")))?;
            events.extend(text.lines().filter_map(decode));
        }
        let program = generate(spec);
        events.extend(hung.into_iter().map(|text| Event::Fault { rank: 0, text }));
        events.extend(self.files_left());
        let report = judge::judge(&program, &events);
        if report.violations.iter().any(|v| v.class == "left over") {
            self.ranks.clear();
        }
        Ok(report)
    }

    /// Until all ranks are through with the program, or dead. Says what went wrong.
    fn supervise(
        &mut self,
        n: usize,
        board: &Arc<Board>,
        stops: &Arc<Mutex<Vec<Event>>>,
    ) -> Vec<String> {
        let begin = Instant::now();
        let (mut over, mut wrong) = (vec![false; n], Vec::new());
        while over.contains(&false) {
            for rank in (0..n).filter(|r| !over[*r]).collect::<Vec<_>>() {
                let Some(worker) = &mut self.ranks[rank] else { continue };
                if let (Some(time), Some(pid)) = (board.asked_to_stop(rank), worker.pid()) {
                    let stops = Arc::clone(stops);
                    std::thread::spawn(move || stop(pid, time, &stops));
                }
                match worker.lines.try_recv() {
                    Ok(line) => over[rank] = line == ".",
                    Err(TryRecvError::Empty) => {}
                    Err(TryRecvError::Disconnected) => {
                        // Its output has ended, and so has the rank. To wait for the process may take the kernel longer than
                        // the others would wait for the rank.
                        board.gone(rank);
                        over[rank] = true;
                        match worker.child.wait() {
                            Ok(status) if status.signal() == Some(9) => {}
                            ended => wrong.push(format!("crash: rank {rank} ended: {ended:?}")),
                        }
                        self.ranks[rank] = None;
                    }
                }
            }
            if begin.elapsed() > HANG {
                let late: Vec<usize> = (0..n).filter(|r| !over[*r]).collect();
                wrong.push(format!("hang: ranks {late:?} are not through after {HANG:?}"));
                self.ranks.clear();
                self.ranks.resize_with(n, || None);
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        wrong
    }

    /// Files of the library, of which none outlives its job.
    fn files_left(&self) -> Option<Event> {
        let mut left = std::fs::read_dir(self.dir.join("tmp")).ok()?.flatten();
        let first = left.next()?.path();
        let text = format!("left over: file {}", first.display());
        let _ = std::fs::remove_dir_all(self.dir.join("tmp"));
        let _ = std::fs::create_dir(self.dir.join("tmp"));
        Some(Event::Fault { rank: 0, text })
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.threads = None;
        self.ranks.clear();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Stops a process for so many milliseconds.
fn stop(pid: Pid, milliseconds: u64, stops: &Mutex<Vec<Event>>) {
    let begin = now();
    if kill_process(pid, Signal::STOP).is_err() {
        return;
    }
    std::thread::sleep(Duration::from_millis(milliseconds));
    let _ = kill_process(pid, Signal::CONT);
    let at = now();
    let stall = Event::Stall { at, length: at - begin };
    stops.lock().unwrap_or_else(PoisonError::into_inner).push(stall);
}
